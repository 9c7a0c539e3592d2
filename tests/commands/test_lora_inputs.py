"""`--lora inputs`: adapters share their functions; the host passes their tensors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ss_convert.command import main as ss_convert
from ss_device.base_model import open_base
from ss_device.bundle import open_bundle
from ss_device.config import SpeculativeConfig
from ss_executor import load_package
from ss_runtime.commands.generate import main as ss_generate
from ss_runtime.commands.validate import main as ss_validate
from tests.commands.conftest import PROMPTS, SIZES, save_with_lora
from tests.tiny_models import random_adapter

SHARED = SpeculativeConfig(
    mode="shared", num_streams=2, num_msa_layers=2, stream_mlp="base", stream_adapter_rank=0,
    lora_rank=2, lora_alpha=3.0,
)  # fmt: skip
CONFIGS = {
    "a": SHARED,
    "b": replace(SHARED, lora_rank=3, lora_alpha=12.0, bigram_rank=2),
    "c": replace(SHARED, lora_rank=1, lora_alpha=1.0),
    "wide": replace(SHARED, lora_rank=40),
    "longer": replace(SHARED, num_streams=3),
}


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    base, root = open_base(models / "base" / "tiny-base"), tmp_path_factory.mktemp("adapters")
    for seed, (app, config) in enumerate(CONFIGS.items()):
        save_with_lora(random_adapter(base, config, seed, app), base, root / app)
        (root / app / "golden_prompts.jsonl").write_text(json.dumps({"prompt": PROMPTS[0]}) + "\n")
    return {app: root / app for app in CONFIGS} | {"lossless": models / "adapters" / "tiny"}


def convert(models, folders, apps, *arguments) -> int:
    named = [part for app in apps for part in ("--adapter", str(folders[app]))]
    return ss_convert(["--models", str(models), *named, *map(str, arguments)])


@pytest.fixture(scope="module")
def shared(models, folders, tmp_path_factory):
    """Two adapters converted together, int8; the third one added."""
    output = tmp_path_factory.mktemp("build") / "shared"
    form = ("--output", output, *SIZES, "--weights", "int8", "--lora", "inputs")
    assert convert(models, folders, "ab", *form) == 0
    before = (output / "coreml/tiny-base.mlpackage/Data/com.apple.CoreML/weights/weight.bin").read_bytes()
    assert convert(models, folders, "c", "--into", output) == 0
    after = (output / "coreml/tiny-base.mlpackage/Data/com.apple.CoreML/weights/weight.bin").read_bytes()
    assert before == after
    return output


def test_all_adapters_run_through_two_functions(shared):
    bundle = open_bundle(shared, verify=True)
    entries = bundle.manifest.adapters
    assert set(entries) == {"a", "b", "c"}
    assert {(e.coreml.prefill, e.coreml.step) for e in entries.values()} == {
        ("adapter_prefill", "adapter_step")
    }
    assert {(e.coreml.lora, e.coreml.lora_rank) for e in entries.values()} == {("inputs", 32)}
    package = load_package(shared / "coreml/tiny-base.mlpackage")
    assert set(package.functions) == {"adapter_prefill", "adapter_step"}
    inputs = {name: set(f.inputs) for name, f in package.functions.items()}
    assert {"lora_q_a", "lora_down_b", "lora_scale"} <= inputs["adapter_prefill"]
    assert "stream_embeddings" in inputs["adapter_step"] - inputs["adapter_prefill"]


def test_every_adapter_equals_its_reference(shared, capsys):
    assert ss_validate([str(shared), "--backend", "executor:float32", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert {r["adapter"] for r in results} == {"a", "b", "c"}
    assert all(r["token_exact"] == r["prompts"] == 1 and not r["differences"] for r in results)


def test_generation_passes_the_chosen_adapter(shared, capsys):
    texts = {}
    for app in "abc":
        command = ["--bundle", str(shared), "--adapter", app, "--prompt", PROMPTS[0], "--json"]
        for plain in ([], ["--plain"]):
            capsys.readouterr()
            assert ss_generate([*command, "--backend", "executor", "--dtype", "float32", *plain]) == 0
            texts.setdefault(app, []).append(json.loads(capsys.readouterr().out)["token_ids"])
    assert all(drafted == plain for drafted, plain in texts.values())
    assert len({tuple(ids) for ids, _ in texts.values()}) > 1


@pytest.mark.parametrize(
    ("apps", "options", "message"),
    [
        (["lossless"], [], "adapter 'tiny' is lossless: no LoRA on the base's rows"),
        (["a", "lossless"], [], "adapter 'tiny' is lossless: no LoRA on the base's rows"),
        (["wide"], ["--lora-rank", "32"], "'wide' has LoRA of rank 40, the functions take 32"),
        (["a", "longer"], [], "'a' and 'longer' differ in num_streams (2, 3)"),
        (["a"], ["--parts", "2"], "leave --parts out"),
    ],
)
def test_what_cannot_be_an_input_is_refused(models, folders, tmp_path, capsys, apps, options, message):
    output = tmp_path / "out"
    assert convert(models, folders, apps, "--output", output, *SIZES, "--lora", "inputs", *options) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not output.exists()


def test_a_bundle_keeps_its_way_of_taking_adapters(models, folders, shared, tmp_path, capsys):
    before = (shared / "manifest.json").read_bytes()
    for apps, options, message in (
        (["wide"], [], "'wide' has LoRA of rank 40, the functions take 32"),
        (["longer"], [], "differ in num_streams"),
        (["a"], ["--lora", "baked"], "was made with --lora inputs"),
    ):
        assert convert(models, folders, apps, "--into", shared, *options) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert (shared / "manifest.json").read_bytes() == before
    assert convert(models, folders, "a", "--output", tmp_path / "o", *SIZES, "--lora-rank", "32") == 2
    assert "--lora-rank is for --lora inputs" in capsys.readouterr().err
