"""Files under the names of earlier versions: read as those under today's, and the same drafts and text.

The old files are made here, key by key, from new ones. Applications are called as old keys were: a name
that somebody gave is no key.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ss_convert.command import main as ss_convert
from ss_device.adapter import load_adapter, save_adapter
from ss_device.base_model import BaseFolder, open_base
from ss_device.bundle import open_bundle
from ss_device.config import SpeculativeConfig, parameter_count
from ss_device.decoding import Drafter, decode
from ss_device.draft_policy import NUM_BINS, NUM_CELLS, Experience, StepCosts
from ss_device.files import sha256
from ss_device.old_names import adapter_entries, manifest_entries
from ss_device.training.bigram_bias import load_bigram_bias, save_bigram_bias
from ss_runtime.backends import adapter_in_memory
from ss_runtime.commands.generate import main as ss_generate
from ss_runtime.mlx.loading import load_model
from ss_runtime.settings import RuntimeSettings
from ss_runtime.tuning import AdaptiveChoice, read_tuning, write_tuning
from tests.tiny_models import make_tiny_base, random_adapter

OWN = SpeculativeConfig(
    num_streams=3, num_msa_layers=2, stream_mlp="base", stream_lora_rank=2, stream_lora_alpha=4.0,
    stream_adapter_rank=0, bigram_rank=4,
)  # fmt: skip
APPS = {"form": OWN, "parent_bias": replace(OWN, bigram_shared=True)}
PROMPT = [1, 40, 41, 42, 40, 41, 97, 5, 200, 41, 42]
SIZES = ("--nodes", "8", "--context", "96", "--chunk", "16")


def old_config(config: dict) -> None:
    config["markov_rank"] = config.pop("bigram_rank")
    config["markov_shared"] = config.pop("bigram_shared")


def old_tensors(file: Path) -> None:
    tensors = load_file(file)
    for factor in ("u", "v"):
        if f"bigram.{factor}" in tensors:
            tensors[f"markov.{factor}"] = tensors.pop(f"bigram.{factor}")
    save_file(tensors, file)


def old_adapter(new: Path, folder: Path) -> Path:
    """The adapter folder as it was written before."""
    shutil.copytree(new, folder)
    file = folder / "speculative_config.json"
    raw = json.loads(file.read_text())
    old_config(raw["config"])
    raw["parameters"]["parent_bias"] = raw["parameters"].pop("bigram_bias")
    raw["parameters"]["shared_parent_bias"] = raw["parameters"].pop("shared_bigram_bias")
    file.write_text(json.dumps(raw))
    old_tensors(folder / "speculative.safetensors")
    return folder


def old_bundle(new: Path, folder: Path) -> Path:
    """The bundle as it was written before, its shared bias where that was kept."""
    shutil.copytree(new, folder)
    (folder / "mlx/bigram_bias").rename(folder / "mlx/parent_bias")
    for file in (*folder.glob("mlx/adapters/*"), *folder.glob("mlx/parent_bias/*")):
        old_tensors(file)
    raw = json.loads((folder / "manifest.json").read_text())
    raw["made"]["form"] = raw["made"].pop("package")
    for entry in raw["adapters"].values():
        old_config(entry["config"])
        file = entry.pop("bigram_bias_file")
        entry["parent_bias_file"] = file and file.replace("bigram_bias", "parent_bias")
    raw["files"] = {
        str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": sha256(p)}
        for p in folder.rglob("*")
        if p.is_file() and p.name not in ("manifest.json", "tuning.json")
    }
    (folder / "manifest.json").write_text(json.dumps(raw))
    return folder


def base_of(models: Path) -> BaseFolder:
    return open_base(models / "base" / "tiny-base")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A base, and an adapter folder per application."""
    folder = tmp_path_factory.mktemp("models")
    base = make_tiny_base(folder / "base" / "tiny-base", dtype="float16")
    for seed, (app, config) in enumerate(APPS.items()):
        adapter = random_adapter(base, config, seed, app)
        save_adapter(adapter, base.architecture, folder / "adapters" / app)
    return folder


@pytest.fixture(scope="module")
def bundles(models, tmp_path_factory) -> dict[str, Path]:
    """One bundle of both adapters under the new names, and under the old ones."""
    folder = tmp_path_factory.mktemp("bundles")
    words = [word for app in APPS for word in ("--adapter", models / "adapters" / app)]
    words += ["--models", models, "--output", folder / "new", "--target", "mlx", "--no-golden", *SIZES]
    assert ss_convert([str(word) for word in words]) == 0
    return {"new": folder / "new", "old": old_bundle(folder / "new", folder / "old")}


def drafted(model, bias) -> list[tuple[list[int], list[int]]]:
    """The tokens of every call, and of its tree."""
    steps = decode(model, Drafter(8, bigram_bias=bias), PROMPT, 20)
    return [(s.tokens, s.tree.tokens.tolist() if s.tree else []) for s in steps]


@pytest.mark.parametrize("app", APPS)
def test_an_adapter_folder(models, tmp_path, app):
    from ss_device.reference.step_model import ReferenceStepModel
    from ss_device.reference.stream_model import load_stream_model

    new = load_adapter(models / "adapters" / app)
    old = load_adapter(old_adapter(models / "adapters" / app, tmp_path / app))
    assert (old.app, old.config, old.base) == (new.app, new.config, new.base) and old.app == app
    files = (folder / "speculative_config.json" for folder in (models / "adapters" / app, tmp_path / app))
    counts = [adapter_entries(json.loads(file.read_text()))["parameters"] for file in files]
    assert counts[0] == counts[1] == parameter_count(new.config, base_of(models).architecture)
    assert old.config.bigram_rank == 4 and old.config.bigram_shared == (app == "parent_bias")
    base = base_of(models)
    found = []
    for adapter in (new, old):
        adapter.check_base(base)
        model = ReferenceStepModel(load_stream_model(base, adapter), 8, 8, 96)
        found.append(drafted(model, adapter.bigram_bias()))
        without = drafted(model, None)
    assert found[0] == found[1] != without


@pytest.mark.parametrize("app", APPS)
def test_a_bundle(bundles, app):
    found = []
    for folder in bundles.values():
        bundle = open_bundle(folder, verify=True)
        assert sorted(bundle.manifest.adapters) == ["form", "parent_bias"]
        adapter = bundle.adapter(app)
        assert (adapter.app, adapter.config) == (app, APPS[app])
        assert bool(adapter.bigram_bias_file) == adapter.config.bigram_shared
        model = load_model(bundle, adapter, RuntimeSettings(dtype="float32"))
        found.append(drafted(model, bundle.bigram_bias(adapter)))
        without = drafted(model, None)
        assert adapter_in_memory(bundle, adapter).tensors.keys() >= {"bigram.u", "bigram.v"}
    assert found[0] == found[1] != without
    new, old = (open_bundle(folder).manifest.made for folder in bundles.values())
    assert old == new


def generated(capsys, folder: Path, app: str) -> dict:
    words = [
        "--bundle",
        str(folder),
        "--adapter",
        app,
        "--prompt",
        "SELECT a",
        "--dtype",
        "float32",
        "--json",
    ]
    capsys.readouterr()
    assert ss_generate(words) == 0
    said = json.loads(capsys.readouterr().out)
    return {name: value for name, value in said.items() if name not in ("seconds", "tokens_per_second")}


def test_commands_take_both(bundles, models, tmp_path, capsys):
    """Text and calls are the same; an adapter of the new names joins a bundle of the old ones."""
    for app in APPS:
        new, old = (generated(capsys, folder, app) for folder in bundles.values())
        assert old == new and len(new["token_ids"]) > 5
    grown = Path(shutil.copytree(bundles["old"], tmp_path / "grown"))
    words = ["--adapter", models / "adapters/form", "--models", models, "--into", grown, "--no-golden"]
    assert ss_convert([str(word) for word in words]) == 0
    assert "markov" not in (grown / "manifest.json").read_text()
    for app in APPS:
        assert generated(capsys, grown, app) == generated(capsys, bundles["new"], app)


def test_a_bigram_bias_file(models, tmp_path):
    base = base_of(models)
    rng = np.random.default_rng(0)
    factors = {f"bigram.{f}": rng.normal(size=(300, 4)).astype(np.float16) for f in "uv"}
    save_bigram_bias(factors, base.identity, tmp_path / "new.safetensors")
    shutil.copy(tmp_path / "new.safetensors", tmp_path / "old.safetensors")
    old_tensors(tmp_path / "old.safetensors")
    assert load_file(tmp_path / "old.safetensors").keys() == {"markov.u", "markov.v"}
    for name in ("new", "old"):
        read, _ = load_bigram_bias(tmp_path / f"{name}.safetensors", base, 4)
        assert read.keys() == factors.keys()
        for factor, values in factors.items():
            np.testing.assert_array_equal(read[factor], values.astype(np.float32))


def test_a_tuning(bundles, capsys):
    ratios = {k: tuple(n + i / 16 for i in range(NUM_BINS)) for n, k in ((1, "lookup"), (2, "leftover"))}
    experience = Experience(900.0, ((2.0, 0.004),) * NUM_CELLS, **ratios, trust=((40, 0.5),))
    choice = AdaptiveChoice(6, StepCosts((1, 6), (0.001, 0.002), 0.0005), experience)
    for folder in bundles.values():
        write_tuning(open_bundle(folder), "form", "float32", choice, {"copies": "kept as it is"})
    file = bundles["old"] / "tuning.json"
    raw = json.loads(file.read_text())
    ((entry,),) = (entries.values() for entries in raw["devices"].values())
    entry["choice"]["experience"]["copies"] = entry["choice"]["experience"].pop("lookup")
    file.write_text(json.dumps(raw))
    for folder in bundles.values():
        assert read_tuning(open_bundle(folder), "form", "float32") == choice
    new, old = (generated(capsys, folder, "form") for folder in bundles.values())
    assert old == new


def test_names_that_somebody_gave_stay():
    """Only keys of known tables are renamed: no application, no entry of a training record, no value."""
    names = ("form", "parent_bias", "markov_rank", "copies", "parent_bias_file")
    adapters = {name: {"app": name, "record": {name: name}, "config": {}} for name in names}
    raw = {"adapters": adapters, "made": {"versions": {"form": "1"}}, "files": {"form": {}}}
    assert manifest_entries(json.loads(json.dumps(raw))) == raw
    for name in names:
        assert adapter_entries({"app": name, "record": {name: 1}}) == {"app": name, "record": {name: 1}}
