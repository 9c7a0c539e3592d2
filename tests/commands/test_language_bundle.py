"""`ss-convert --target coreai`: the base in Apple's tools, from the bundle's folder `coreai`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

pytest.importorskip("coreai", reason="coreai-core is not installed")

from ss_convert.command import main as ss_convert
from ss_device.adapter import save_adapter
from ss_device.base_model import open_base
from ss_device.bundle import open_bundle
from ss_device.config import SpeculativeConfig
from ss_runtime.commands.generate import main as ss_generate
from tests.commands.conftest import PROMPTS, SIZES
from tests.convert.coreai.apple_engine import AppleEngine
from tests.convert.coreai.language_bundle_reader import LanguageBundle, read_language_bundle
from tests.tiny_models import random_adapter

COUNT = 12
# Ours puts it in front of prompts; theirs does where the tokenizer's own template says so.
BOS = "<|bos|>"
NO_MAIN = "no function 'main' of the base for Apple's tools"
DEMO = Path(__file__).resolve().parents[2] / "models"


@pytest.fixture(scope="module")
def other(models, tmp_path_factory) -> Path:
    """A second adapter, with other streams."""
    base = open_base(models / "base" / "tiny-base")
    folder = tmp_path_factory.mktemp("adapters") / "other"
    config = SpeculativeConfig(num_streams=2, num_msa_layers=1)
    save_adapter(random_adapter(base, config, seed=5, app="other"), base.architecture, folder)
    return folder


def convert(output: Path, models: Path, *arguments: object, adapter: object = "tiny") -> Path:
    """Convert to Core AI without golden traces, which say nothing of `main`."""
    command = ["--adapter", adapter, "--models", models, "--no-golden", *arguments]
    if "--into" not in arguments:
        command += ["--output", output, "--target", "mlx,coreai"]
    assert ss_convert([str(argument) for argument in command]) == 0
    return output


def main_text(found: LanguageBundle, prompt: str, count: int = COUNT, dtype: str = "float32") -> list[int]:
    """What Apple's engine makes of a prompt, by the bundle's own tokenizer."""
    assert found.function == "main"
    ids = Tokenizer.from_file(str(found.tokenizer / "tokenizer.json")).encode(BOS + prompt).ids
    engine = AppleEngine(found.main, found.max_context_length, dtype)
    return engine.generate(ids, count)


def plain_text(bundle: Path, capsys, *arguments: str) -> list[int]:
    """The same from `ss-generate --plain`."""
    capsys.readouterr()
    command = ["--bundle", str(bundle), "--plain", "--json", "--dtype", "float32", *arguments]
    assert ss_generate(command) == 0
    return json.loads(capsys.readouterr().out)["token_ids"]


def same(ours: list[int], theirs: list[int], least: int = 5) -> bool:
    """Ours may have ended before."""
    return len(ours) >= least and theirs[: len(ours)] == ours


@pytest.mark.parametrize("weights", ["fp16", "int8", "int4"])
def test_the_folder_is_a_language_bundle(models, tmp_path, capsys, weights):
    size = (*SIZES, "--weights", weights, "--embedding-weights", "fp16" if weights == "fp16" else "int8")
    output = convert(tmp_path / "bundle", models, *size)
    capsys.readouterr()
    found = read_language_bundle(output / "coreai")
    manifest = open_bundle(output, verify=True).manifest
    assert (found.vocab_size, found.max_context_length) == (manifest.architecture.vocab_size, 96)
    assert (output / "coreai" / found.user_data["ss_device_manifest"]).samefile(output / "manifest.json")
    assert found.user_data["base_sha256"] == manifest.base.sha256
    inside = {name for name in manifest.files if name.startswith("coreai/")}
    assert {
        "coreai/metadata.json",
        "coreai/tokenizer/tokenizer.json",
        "coreai/tokenizer/config.json",
    } < inside
    ours = plain_text(output, capsys, "--backend", "coreai", "--prompt", PROMPTS[0])
    assert same(ours, main_text(found, PROMPTS[0], len(ours)))


def test_adapters_that_are_added_leave_main(models, other, tmp_path):
    output = convert(tmp_path / "bundle", models, *SIZES)
    found = read_language_bundle(output / "coreai")
    text = main_text(found, PROMPTS[0])
    metadata = (output / "coreai" / "metadata.json").read_bytes()
    # The second addition takes the place of all that is there.
    for into in (("--into", output), ("--into", output, "--adapter", "tiny")):
        convert(output, models, *into, adapter=other)
        assert sorted(open_bundle(output, verify=True).manifest.adapters) == ["other", "tiny"]
        assert (output / "coreai" / "metadata.json").read_bytes() == metadata
        assert main_text(read_language_bundle(output / "coreai"), PROMPTS[0]) == text


@pytest.mark.parametrize(
    ("arguments", "reason"), [(("--parts", "2"), "2 parts"), (("--preset", "ane"), "Neural Engine")]
)
def test_where_there_is_no_main_the_conversion_says_so(models, tmp_path, capsys, arguments, reason):
    output = convert(tmp_path / "bundle", models, *SIZES, *arguments, "--json")
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert [note for note in notes if NO_MAIN in note and reason in note]
    files = open_bundle(output).manifest.files
    assert not {n for n in files if n.startswith(("coreai/metadata", "coreai/tokenizer"))}


@pytest.mark.heavy
def test_the_demo_base_answers_as_ss_generate_does(tmp_path, capsys):
    output = convert(tmp_path / "bundle", DEMO, adapter="sqlctx")
    bundle = open_bundle(output)
    row = json.loads((DEMO.parent / "apps/sqlctx/demo.jsonl").read_text().splitlines()[0])
    prompt = bundle.adapter().prompt(row)
    ours = plain_text(output, capsys, "--backend", "mlx", "--prompt", prompt)
    found = read_language_bundle(output / "coreai")
    for dtype in ("float32", "float16"):
        assert same(ours, main_text(found, prompt, len(ours), dtype)), dtype
