"""Several adapters in one bundle: one package, base weights once, adapters added later."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ss_convert.command import main as ss_convert
from ss_device.adapter import save_adapter
from ss_device.base_model import open_base
from ss_device.bundle import BIGRAM_BIAS, open_bundle
from ss_device.config import SpeculativeConfig
from ss_device.errors import UserError
from ss_device.trace import load_traces
from ss_executor import load_package
from ss_runtime.backends import adapter_in_memory
from ss_runtime.commands.generate import main as ss_generate
from ss_runtime.commands.validate import main as ss_validate
from ss_runtime.mlx.adapter_bank import AdapterBank
from ss_runtime.settings import RuntimeSettings
from tests.commands.conftest import PROMPTS, SIZES, save_with_lora
from tests.tiny_models import random_adapter

PAPER = SpeculativeConfig(num_streams=2, num_msa_layers=1, pruning_rank=2)
SHARED = SpeculativeConfig(
    mode="shared", num_streams=2, num_msa_layers=2, stream_mlp="base", stream_adapter_rank=0,
    lora_rank=2, lora_alpha=3.0,
)  # fmt: skip
APPS = ("2nd-app", "tiny", "with.lora")


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory) -> dict[str, Path]:
    """Three adapters of the same base by application: their names are no identifiers."""
    base = open_base(models / "base" / "tiny-base")
    root = tmp_path_factory.mktemp("adapters")
    save_adapter(random_adapter(base, PAPER, seed=5, app="2nd-app"), base.architecture, root / "2nd")
    save_with_lora(random_adapter(base, SHARED, seed=6, app="with.lora"), base, root / "lora")
    for name in ("2nd", "lora"):
        (root / name / "golden_prompts.jsonl").write_text(json.dumps({"prompt": PROMPTS[0]}) + "\n")
    return {"2nd-app": root / "2nd", "with.lora": root / "lora", "tiny": models / "adapters" / "tiny"}


def convert(models, *arguments) -> int:
    return ss_convert(["--models", str(models), *map(str, arguments)])


def named(folders, *apps) -> list[str]:
    return [part for app in apps for part in ("--adapter", str(folders[app]))]


@pytest.fixture(scope="module")
def three(models, folders, tmp_path_factory) -> Path:
    """Two adapters converted together, the third added, with int8 weights."""
    output = tmp_path_factory.mktemp("build") / "three"
    adapters = named(folders, "tiny", "2nd-app")
    assert convert(models, *adapters, "--output", output, *SIZES, "--weights", "int8") == 0
    before = weight_bytes(output)
    assert convert(models, *named(folders, "with.lora"), "--into", output) == 0
    # LoRA of 3 layers and the streams, nothing of the base again.
    assert weight_bytes(output) - before < 40_000
    return output


def weight_bytes(bundle: Path) -> int:
    return (bundle / "coreml/tiny-base.mlpackage/Data/com.apple.CoreML/weights/weight.bin").stat().st_size


def test_a_shared_bigram_bias_is_stored_and_held_once(models, tmp_path):
    """Adapters that say so keep their equal factors in one file; another bias gets a file of its own."""
    base = open_base(models / "base" / "tiny-base")
    config = replace(PAPER, bigram_rank=3, bigram_shared=True)
    adapters = {app: random_adapter(base, config, seed=n, app=app) for n, app in enumerate("abc")}
    for name in BIGRAM_BIAS:
        adapters["b"].tensors[name] = adapters["a"].tensors[name]
    for app, adapter in adapters.items():
        save_adapter(adapter, base.architecture, tmp_path / app)
    output, options = tmp_path / "out", (*SIZES, "--no-golden", "--target", "mlx")
    assert convert(models, "--adapter", tmp_path / "a", "--output", output, *options) == 0
    for app in "bcc":
        assert convert(models, "--adapter", tmp_path / app, "--into", output, "--no-golden") == 0
    bundle = open_bundle(output, verify=True)
    files = {app: entry.bigram_bias_file for app, entry in bundle.manifest.adapters.items()}
    assert files["a"] == files["b"] != files["c"]
    stored = {name for name in bundle.manifest.files if name.startswith("mlx/bigram_bias/")}
    assert stored == set(files.values())
    bank = AdapterBank(bundle, RuntimeSettings(dtype="float32"))
    biases = {app: bank.activate(app).bigram_bias for app in "abc"}
    assert biases["a"] is biases["b"] and biases["c"] is not biases["a"]
    for app, adapter in adapters.items():
        assert not set(BIGRAM_BIAS) & set(load_file(output / bundle.adapter(app).tensor_file))
        np.testing.assert_array_equal(biases[app].u, adapter.tensors["bigram.u"])
        np.testing.assert_array_equal(biases[app].v, adapter.tensors["bigram.v"])
        again = adapter_in_memory(bundle, bundle.adapter(app))
        assert again.tensors.keys() == adapter.tensors.keys()
    # The last adapter with its bias replaced: nobody has the old file any more.
    for name in BIGRAM_BIAS:
        adapters["c"].tensors[name] = adapters["a"].tensors[name]
    save_adapter(adapters["c"], base.architecture, tmp_path / "d")
    assert convert(models, "--adapter", tmp_path / "d", "--into", output, "--no-golden") == 0
    assert len(list((output / "mlx/bigram_bias").iterdir())) == 1


def test_a_damaged_shared_bigram_bias_is_named(models, tmp_path):
    base = open_base(models / "base" / "tiny-base")
    config = replace(PAPER, bigram_rank=3, bigram_shared=True)
    save_adapter(random_adapter(base, config, app="a"), base.architecture, tmp_path / "a")
    options = (*SIZES, "--no-golden", "--target", "mlx")
    assert convert(models, "--adapter", tmp_path / "a", "--output", tmp_path / "out", *options) == 0
    bundle = open_bundle(tmp_path / "out")
    file = bundle.path / bundle.adapter().bigram_bias_file
    save_file({"bigram.u": np.zeros((300, 3), np.float16)}, file)
    with pytest.raises(UserError, match=r"bigram_bias/.*'a' lacks 'bigram.v' of shape \(300, 3\)"):
        bundle.bigram_bias(bundle.adapter())


def generate(capsys, bundle, *arguments) -> tuple[int, ...]:
    capsys.readouterr()
    assert ss_generate(["--bundle", str(bundle), "--json", "--prompt", PROMPTS[0], *arguments]) == 0
    return tuple(json.loads(capsys.readouterr().out)["token_ids"])


def test_one_package_holds_the_functions_of_all(three):
    bundle = open_bundle(three, verify=True)
    assert tuple(sorted(bundle.manifest.adapters)) == APPS
    entries = bundle.manifest.adapters.values()
    assert {entry.coreml.package for entry in entries} == {"coreml/tiny-base.mlpackage"}
    package = load_package(three / "coreml/tiny-base.mlpackage")
    names = {name for entry in entries for name in (entry.coreml.prefill, entry.coreml.step)}
    assert set(package.functions) == names
    assert {"app_2nd_app_step", "with_lora_prefill"} <= names
    assert package.metadata["apps"].split(" ")[:2] == ["tiny", "2nd-app"]
    for app in APPS:
        assert json.loads(package.metadata[f"adapter.{app}"])["num_nodes"] == 12
    assert bundle.manifest.made.package["weights"] == package.metadata["weights"] == "int8"
    sizes = bundle.manifest.made.package_bytes
    assert (
        tuple(sizes["own"]) == APPS
        and sum(sizes["own"].values()) + sizes["shared"] <= sizes["weight_bytes"]
    )
    # Embedding and projections in int8; scales, norms and the rotary table come on top.
    projections = 3 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48)
    assert 300 * 32 + projections < sizes["shared"] < 2 * (300 * 32 + projections)
    assert {p.name for p in three.iterdir()} == {
        "manifest.json",
        "config.json",
        "tokenizer.json",
        "mlx",
        "coreml",
        "golden",
    }


@pytest.mark.parametrize("app", APPS)
def test_every_back_end_runs_the_adapter_it_is_told(capsys, three, app):
    bundle = open_bundle(three)
    entry = bundle.adapter(app)
    recorded = {
        "mlx": load_traces(three / entry.golden)[0].generated,
        "reference": load_traces(three / entry.golden)[0].generated,
        "executor": load_traces(three / entry.coreml.golden)[0].generated,
    }
    for backend, tokens in recorded.items():
        arguments = ("--adapter", app, "--backend", backend, "--dtype", "float32")
        assert generate(capsys, three, *arguments) == tokens
    assert ss_validate([str(three), "--adapter", app, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [r["backend"] for r in results] == ["mlx", "executor", "executor"]
    assert all(r["token_exact"] == r["prompts"] for r in results[:2])


def test_the_adapter_must_be_named(refuses, three):
    says = ("name one of its adapters", "2nd-app, tiny, with.lora")
    refuses(ss_generate, "--bundle", three, "--prompt", "a", says=says)


def test_adding_an_adapter_again_replaces_it(models, folders, three, tmp_path, capsys):
    copy = Path(shutil.copytree(three, tmp_path / "copy"))
    assert convert(models, *named(folders, "2nd-app"), "--into", copy, "--keep", 6) == 0
    bundle = open_bundle(copy, verify=True)
    assert bundle.adapter("2nd-app").coreml.num_kept == 6
    assert tuple(sorted(bundle.manifest.adapters)) == APPS
    tokens = generate(capsys, copy, "--adapter", "tiny", "--backend", "executor", "--dtype", "float32")
    assert tokens == load_traces(three / bundle.adapter("tiny").coreml.golden)[0].generated


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--weights", "lut4"), ("was made with --weights int8, not lut4",)),
        (("--nodes", "5"), ("was made with --nodes 12, not 5",)),
        (("--target", "mlx"), ("has the targets coreml, mlx",)),
        (("--output", "elsewhere"), ("--output", "not allowed with")),
    ],
)
def test_into_keeps_what_the_bundle_was_made_with(refuses, models, folders, three, more, says):
    arguments = ("--models", models, *named(folders, "tiny"), "--into", three, *more)
    refuses(ss_convert, *arguments, says=says)


def test_into_a_bundle_of_another_base_is_refused(refuses, models, folders, three, tmp_path):
    """The base folder was trained on, and the adapter with it: the bundle's old weights no longer fit."""
    base = open_base(models / "base" / "other-base")
    save_adapter(random_adapter(base, PAPER, app="other"), base.architecture, tmp_path / "other")
    before = (three / "manifest.json").read_bytes()
    arguments = ("--models", models, "--adapter", tmp_path / "other", "--into", three)
    refuses(ss_convert, *arguments, says=("was made from base 'tiny-base'", "this base is 'other-base'"))
    assert (three / "manifest.json").read_bytes() == before


def test_names_that_clash_are_refused(refuses, models, folders, tmp_path):
    base = open_base(models / "base" / "tiny-base")
    save_adapter(random_adapter(base, PAPER, app="with-lora"), base.architecture, tmp_path / "clash")
    twice = ("--models", models, *named(folders, "tiny", "tiny"))
    refuses(ss_convert, *twice, says=("'tiny' is named twice",))
    arguments = (*named(folders, "with.lora"), "--adapter", tmp_path / "clash")
    says = ("'with.lora' and 'with-lora'", "with_lora_step")
    refuses(ss_convert, "--models", models, *arguments, "--output", tmp_path / "out", says=says)
    assert not (tmp_path / "out").exists()
