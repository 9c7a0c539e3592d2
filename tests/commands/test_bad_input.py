"""Bad input: one clear line on stderr, exit code 2, never a traceback."""

from __future__ import annotations

import json
import sys

import pytest

from ss_convert.command import main as ss_convert
from ss_device.adapter import save_adapter
from ss_device.base_model import open_base
from ss_device.bundle import open_bundle
from ss_device.config import SpeculativeConfig
from ss_runtime.commands.generate import main as ss_generate
from ss_runtime.commands.validate import main as ss_validate
from tests.commands.conftest import SIZES, rewrite_manifest
from tests.tiny_models import random_adapter


def convert_arguments(models, tmp_path, *more):
    return ("--adapter", "tiny", "--models", models, "--output", tmp_path / "out", *SIZES, *more)


def test_unknown_adapter_lists_those_found(refuses, models):
    says = ("unknown adapter 'sqlctx'", "found: tiny")
    refuses(ss_convert, "--adapter", "sqlctx", "--models", models, says=says)


def test_adapter_for_another_base(refuses, models, tmp_path):
    other = models / "base" / "other-base"
    arguments = convert_arguments(models, tmp_path, "--base", other)
    says = ("adapter 'tiny' was trained on base 'tiny-base'", "this base is 'other-base'", "sha256")
    refuses(ss_convert, *arguments, says=says)
    assert not list(tmp_path.iterdir())


def test_adapter_for_another_tokenizer(refuses, own_models, tmp_path):
    tokenizer = own_models / "base" / "tiny-base" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    refuses(ss_convert, *convert_arguments(own_models, tmp_path), says=("another tokenizer",))


def test_missing_base(refuses, own_models, tmp_path):
    (own_models / "base" / "tiny-base").rename(own_models / "base" / "renamed")
    says = ("base model 'tiny-base'", "found: other-base, renamed", "--base")
    refuses(ss_convert, *convert_arguments(own_models, tmp_path), says=says)


def test_missing_tokenizer(refuses, own_models, tmp_path):
    (own_models / "base" / "tiny-base" / "tokenizer.json").unlink()
    refuses(ss_convert, *convert_arguments(own_models, tmp_path), says=("tiny-base", "no tokenizer.json"))


def test_top_keys_are_refused_for_core_ml_alone(refuses, own_models, tmp_path):
    """Nothing is silently left out of a graph: the line says which target has it."""
    base = open_base(own_models / "base" / "tiny-base")
    config = SpeculativeConfig(num_streams=2, num_msa_layers=2, stream_top_keys=5)
    save_adapter(random_adapter(base, config), base.architecture, own_models / "adapters" / "tiny")
    arguments = convert_arguments(own_models, tmp_path, "--no-golden")
    refuses(ss_convert, *arguments, says=("adapter 'tiny'", "stream_top_keys", "--target mlx"))
    assert not (tmp_path / "out").exists()
    assert ss_convert([*map(str, arguments), "--target", "mlx"]) == 0
    assert open_bundle(tmp_path / "out").adapter().config.stream_top_keys == 5


def test_truncated_adapter_tensors(refuses, own_models, tmp_path):
    file = own_models / "adapters" / "tiny" / "speculative.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    says = ("speculative.safetensors", "not a readable safetensors file")
    refuses(ss_convert, *convert_arguments(own_models, tmp_path), says=says)


def test_truncated_and_changed_base_weights(refuses, own_models, tmp_path):
    """The file itself gives a missing end away, the digest a changed weight."""
    file = own_models / "base" / "tiny-base" / "model.safetensors"
    whole = file.read_bytes()
    arguments = convert_arguments(own_models, tmp_path)
    file.write_bytes(whole[:-100])
    refuses(ss_convert, *arguments, says=("model.safetensors", "not a readable safetensors file"))
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refuses(ss_convert, *arguments, says=("was trained on base 'tiny-base'",))
    assert not (tmp_path / "out").exists()


def test_newer_adapter_format(refuses, own_models, tmp_path):
    file = own_models / "adapters" / "tiny" / "speculative_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format_version": 9}))
    refuses(ss_convert, *convert_arguments(own_models, tmp_path), says=("format version 9",))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--context", "9999"), "context 9999 exceeds the 256 positions"),
        (("--keep", "13"), "--keep 13 exceeds the 12 nodes"),
        (("--nodes", "0"), "0 is not at least 1"),
        (("--chunk", "many"), "'many' is not a whole number"),
        (("--target", "onnx"), "onnx"),
        (("--golden-prompts", "missing.jsonl"), "missing.jsonl: no such file"),
        (("--frobnicate",), "--frobnicate"),
    ],
)
def test_options_that_do_not_fit(refuses, models, tmp_path, options, says):
    refuses(ss_convert, *convert_arguments(models, tmp_path, *options), says=(says,))


def test_golden_prompt_without_fields_names_file_and_line(refuses, models, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"question": "b"}\n')
    says = (f"{file}:3", "no field 'prompt'", "found question")
    # The tiny application's template is "{prompt}".
    refuses(ss_convert, *convert_arguments(models, tmp_path, "--golden-prompts", file), says=says)


def test_output_that_is_no_bundle_is_not_replaced(refuses, models, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").write_text("mine")
    refuses(ss_convert, *convert_arguments(models, tmp_path), says=("not a bundle",))
    assert (tmp_path / "out" / "letter.txt").read_text() == "mine"


@pytest.mark.parametrize("command", ["generate", "validate"])
def test_bundle_of_a_newer_format(refuses, copied, command):
    file = copied / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format_version": 2}))
    says = ("format version 2", "reads 1", "update")
    if command == "generate":
        refuses(ss_generate, "--bundle", copied, "--prompt", "a", says=says)
    else:
        refuses(ss_validate, copied, says=says)


def test_folder_that_is_no_bundle(refuses, tmp_path):
    refuses(ss_generate, "--bundle", tmp_path, "--prompt", "a", says=("not a bundle", "ss-convert"))


def test_unknown_adapter_of_a_bundle(refuses, bundle):
    arguments = ("--bundle", bundle, "--prompt", "a", "--adapter", "sqlctx")
    refuses(ss_generate, *arguments, says=("no adapter 'sqlctx'", "found: tiny"))


def test_more_nodes_than_the_functions_take(refuses, copied):
    file = copied / "manifest.json"
    raw = json.loads(file.read_text())
    taken = raw["adapters"]["tiny"]["coreml"]["num_nodes"]
    raw["adapters"]["tiny"]["num_nodes"] = taken + 2
    file.write_text(json.dumps(raw))
    says = ("manifest.json: adapter 'tiny'", f"{taken + 2} nodes", f"at most {taken}")
    refuses(ss_generate, "--bundle", copied, "--prompt", "a", "--backend", "executor", says=says)


def test_truncated_file_of_a_bundle(refuses, copied):
    file = copied / "mlx" / "base.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    refuses(ss_generate, "--bundle", copied, "--prompt", "a", says=("mlx/base.safetensors", "expected"))


def test_truncated_weights_with_a_manifest_that_agrees(refuses, copied):
    file = copied / "mlx" / "base.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    rewrite_manifest(copied)
    for backend in ("mlx", "reference"):
        arguments = ("--bundle", copied, "--prompt", "a", "--backend", backend)
        refuses(ss_generate, *arguments, says=("base.safetensors", "not a readable safetensors file"))


def test_missing_tokenizer_of_a_bundle(refuses, copied):
    (copied / "tokenizer.json").unlink()
    refuses(ss_generate, "--bundle", copied, "--prompt", "a", says=("tokenizer.json", "missing"))


@pytest.mark.parametrize("backend", ["mlx", "executor", "reference"])
def test_prompt_longer_than_the_context(refuses, bundle, backend):
    arguments = ("--bundle", bundle, "--prompt", "a" * 400, "--backend", backend)
    context = 96 if backend == "executor" else 256
    refuses(ss_generate, *arguments, says=("prompt has 401 tokens", f"context holds {context}"))


def test_long_row_of_an_input_file_names_file_and_line(refuses, bundle, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": "a" * 400}) + "\n")
    refuses(ss_generate, "--bundle", bundle, "--input", file, says=(f"{file}:2", "401 tokens"))


@pytest.mark.parametrize("backend", ["mlx", "executor"])
def test_more_nodes_than_the_package_has(refuses, bundle, backend):
    arguments = ("--bundle", bundle, "--prompt", "a", "--nodes", 13, "--backend", backend)
    refuses(ss_generate, *arguments, says=("--nodes 13", "at most 12 nodes"))


def test_input_file_errors_name_file_and_line(refuses, bundle, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"query": "b"}\n')
    refuses(ss_generate, "--bundle", bundle, "--input", file, says=(f"{file}:3", "'prompt'", "query"))
    file.write_text('{"prompt": "a"}\n{broken\n')
    refuses(ss_generate, "--bundle", bundle, "--input", file, says=(f"{file}:2", "not valid JSON"))
    file.write_text('{"prompt": 7}\n')
    refuses(ss_generate, "--bundle", bundle, "--input", file, says=(f"{file}:1", "expected text"))
    file.write_text("")
    refuses(ss_generate, "--bundle", bundle, "--input", file, says=("no rows",))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--prompt", "a", "--backend", "onnx"), "unknown back end 'onnx' (known: mlx, executor"),
        (("--prompt", "a", "--backend", "executor", "--dtype", "bfloat16"), "does not compute in bfloat16"),
        (("--prompt", "a", "--plain", "--nodes", "4"), "--plain"),
        (("--prompt", "a", "--shape", "ring"), "ring"),
        (("--prompt", "a", "--input", "b.jsonl"), "not allowed with"),
        ((), "--prompt --input"),
        (("--input", "missing.jsonl"), "missing.jsonl: no such file"),
    ],
)
def test_generate_options(refuses, bundle, arguments, says):
    refuses(ss_generate, "--bundle", bundle, *arguments, says=(says,))


def test_core_ml_off_a_mac(refuses, bundle, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    arguments = ("--bundle", bundle, "--prompt", "a", "--backend", "coreml")
    refuses(ss_generate, *arguments, says=("Core ML runs on a Mac only", "executor"))
    refuses(ss_validate, bundle, "--backend", "coreml", says=("Core ML runs on a Mac only",))


def package_files(copied):
    package = copied / open_bundle(copied).adapter().coreml.package
    return next(package.rglob("*.mlmodel")), next(package.rglob("weight.bin"))


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("how", ["truncated", "overwritten", "missing"])
def test_damaged_core_ml_package(refuses, copied, part, how):
    """With a manifest that agrees, so that the executor itself has to notice."""
    file = package_files(copied)[part]
    content = file.read_bytes()
    if how == "missing":
        file.unlink()
    elif how == "truncated":
        file.write_bytes(content[: len(content) // 3])
    else:
        file.write_bytes(b"\xff" * len(content))
    rewrite_manifest(copied)
    arguments = ("--bundle", copied, "--prompt", "a", "--backend", "executor")
    refuses(ss_generate, *arguments, says=("tiny-base.mlpackage",))
    refuses(ss_validate, copied, "--backend", "executor", says=("tiny-base.mlpackage",))


def test_changed_package_is_noticed_by_its_digest(refuses, copied):
    weights = package_files(copied)[1]
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 0xFF
    weights.write_bytes(bytes(content))
    refuses(ss_validate, copied, says=("weight.bin", "changed after the conversion"))


def test_bundle_without_golden_traces(refuses, copied):
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["adapters"]["tiny"]["golden"] = None
    (copied / "manifest.json").write_text(json.dumps(manifest))
    refuses(ss_validate, copied, says=("no golden traces",))


@pytest.mark.parametrize("backend", ["onnx", "mlx:int8", "mlx:bfloat16"])
def test_validate_back_end_names(refuses, bundle, backend):
    refuses(ss_validate, bundle, "--backend", backend, says=(backend.partition(":")[2] or backend,))
