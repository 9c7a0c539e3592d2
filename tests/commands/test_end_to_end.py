"""Convert, generate, validate on a tiny random model: every back end of this machine, same tokens."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from scripts import demo
from ss_convert.command import main as ss_convert
from ss_device.base_model import open_base
from ss_device.bundle import open_bundle
from ss_device.config import SpeculativeConfig
from ss_device.trace import load_traces
from ss_runtime.commands.generate import main as ss_generate
from ss_runtime.commands.validate import main as ss_validate
from ss_runtime.tokenization import load_tokenizer
from tests.commands.conftest import PROMPTS, SIZES, rewrite_manifest, save_with_lora
from tests.tiny_models import random_adapter

KEYS = {
    "text",
    "token_ids",
    "prompt_tokens",
    "generated_tokens",
    "steps",
    "tokens_per_call",
    "seconds",
    "finish_reason",
    "lossy_typical",
}


def generate(capsys, bundle, *arguments) -> list[dict]:
    capsys.readouterr()
    assert ss_generate(["--bundle", str(bundle), "--json", *map(str, arguments)]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def validate(capsys, bundle, *arguments) -> tuple[int, dict]:
    capsys.readouterr()
    status = ss_validate([str(bundle), "--json", *map(str, arguments)])
    return status, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def expected(bundle) -> tuple[int, ...]:
    """What the reference generated for the first golden prompt."""
    return load_traces(bundle / "golden" / "tiny")[0].generated


def test_bundle_holds_both_targets_and_golden_traces(bundle):
    opened = open_bundle(bundle, verify=True)
    adapter = opened.adapter()
    assert adapter.coreml.num_nodes == adapter.num_nodes == 12
    assert (bundle / adapter.coreml.package).is_dir()
    assert {"tokenizer.json", "mlx/base.safetensors", adapter.tensor_file} <= set(opened.manifest.files)
    tokenizer = load_tokenizer(opened)
    traces = load_traces(bundle / adapter.golden)
    assert [t.text for t in traces] == list(PROMPTS)
    assert [list(t.prompt) for t in traces] == [tokenizer.encode(text) for text in PROMPTS]
    assert not list(bundle.parent.glob(".*"))


@pytest.mark.parametrize("backend", ["mlx", "executor", "reference"])
def test_back_ends_generate_the_reference_tokens(capsys, bundle, expected, backend):
    arguments = ("--prompt", PROMPTS[0], "--backend", backend, "--dtype", "float32")
    [result] = generate(capsys, bundle, *arguments)
    assert set(result) == KEYS and set(result["seconds"]) == {"prefill", "decode"}
    assert tuple(result["token_ids"]) == expected
    assert result["generated_tokens"] == len(expected)
    [plain] = generate(capsys, bundle, *arguments, "--plain")
    assert plain["token_ids"] == result["token_ids"] and plain["text"] == result["text"]
    assert plain["tokens_per_call"] == 1.0
    assert plain["steps"] == plain["generated_tokens"] - 1


SHAPES = (("chain",), ("k-ary", "--tree-top-k", "2"), ("best-first", "--nodes", "5"))


@pytest.mark.parametrize("shape", SHAPES)
def test_tree_shapes_do_not_change_the_text(capsys, bundle, expected, shape):
    [result] = generate(capsys, bundle, "--prompt", PROMPTS[0], "--backend", "mlx", "--shape", *shape)
    assert tuple(result["token_ids"]) == expected


def test_input_file_gives_one_object_per_row(capsys, bundle, tmp_path):
    file = tmp_path / "rows.jsonl.gz"
    with gzip.open(file, "wt") as rows:
        rows.writelines(json.dumps({"prompt": f"row {i}"}) + "\n" for i in range(3))
    results = generate(capsys, bundle, "--input", file, "--limit", 2, "--max-tokens", 4)
    assert len(results) == 2
    assert all(r["generated_tokens"] <= 4 for r in results)


def test_text_streams_to_stdout_and_figures_to_stderr(capsys, bundle):
    arguments = ["--bundle", str(bundle), "--prompt", PROMPTS[0], "--backend", "mlx"]
    [result] = generate(capsys, bundle, *arguments[2:])
    assert ss_generate(arguments) == 0
    output = capsys.readouterr()
    assert output.out == result["text"] + "\n"
    assert "tokens per call" in output.err


def test_show_steps_draws_one_line_per_call(capsys, bundle):
    arguments = ["--bundle", str(bundle), "--prompt", PROMPTS[0], "--backend", "mlx", "--show-steps"]
    [result] = generate(capsys, bundle, *arguments[2:])
    assert ss_generate(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    calls = [line.split()[:3] for line in lines[2:-1]]
    assert [int(c[0]) for c in calls] == list(range(result["steps"] + 1))
    assert sum(int(c[2]) for c in calls) == result["generated_tokens"]
    assert "⟦" in lines[0] and f"{result['steps']} calls" in lines[-1]


def test_validate_passes_on_every_back_end(capsys, bundle):
    status, report = validate(capsys, bundle)
    assert status == 0 and report["passed"] and not report["left_out"]
    done = [(r["backend"], r["dtype"]) for r in report["results"]]
    assert done == [("mlx", "float32"), ("executor", "float32"), ("executor", "float16")]
    for result in report["results"]:
        assert result["prompts"] == 2
        assert all(d["near_tie"] and d["margin"] <= result["near_tie_limit"] for d in result["differences"])
    for result in report["results"][:2]:
        assert result["token_exact"] == 2 and not result["differences"]
        assert result["max_logit_difference"] < 1e-3


def test_validate_prints_a_table(capsys, bundle):
    arguments = [str(bundle), "--backend", "reference", "--backend", "mlx:float32", "--limit", "1"]
    assert ss_validate(arguments) == 0
    table = capsys.readouterr().out
    assert "reference" in table and "mlx" in table and "passed" in table


@pytest.mark.parametrize("tensor", ["layers.1.mlp.up.weight", "stream_embeddings"])
def test_validate_catches_a_changed_weight(capsys, copied, tensor):
    """A changed base weight changes choices; a changed stream only drafts, which the probes see."""
    part = "base" if tensor.startswith("layers") else "adapters/tiny"
    file = copied / "mlx" / f"{part}.safetensors"
    tensors = load_file(file)
    tensors[tensor] = np.ascontiguousarray(tensors[tensor][::-1])
    save_file(tensors, file)
    rewrite_manifest(copied)
    status, report = validate(capsys, copied, "--backend", "mlx:float32")
    assert status == 1 and not report["passed"]
    assert report["results"][0]["failures"]
    assert ss_validate([str(copied), "--backend", "mlx:float32"]) == 1
    assert "FAILED" in capsys.readouterr().out


SHARED = SpeculativeConfig(
    mode="shared",
    num_streams=2,
    num_msa_layers=2,
    main_attends_streams=True,
    stream_mlp="base",
    stream_adapter_rank=0,
    lora_rank=2,
    lora_alpha=4.0,
)


@pytest.fixture(scope="module")
def shared_adapter(models, tmp_path_factory):
    """A shared-mode adapter folder: speculative files and LoRA under PEFT's names."""
    base = open_base(models / "base" / "tiny-base")
    folder = tmp_path_factory.mktemp("adapters") / "shared"
    save_with_lora(random_adapter(base, SHARED, app="shared"), base, folder)
    (folder / "golden_prompts.jsonl").write_text('{"prompt": "one two"}\n')
    return folder


def test_pruned_shared_mode_bundle_agrees_on_every_back_end(capsys, models, shared_adapter, tmp_path):
    output = tmp_path / "pruned"
    arguments = ["--adapter", str(shared_adapter), "--models", str(models), "--output", str(output), *SIZES]
    assert ss_convert([*arguments, "--keep", "5", "--prune-over", "vocabulary"]) == 0
    status, report = validate(capsys, output, "--dtype", "float32")
    assert status == 0
    assert [r["exact_weights"] for r in report["results"]] == [True, True]
    assert report["results"][0]["dropped_nodes"] == 0
    [trace] = load_traces(output / "golden" / "shared")
    for backend in ("mlx", "executor", "reference"):
        arguments = ("--prompt", "one two", "--backend", backend, "--dtype", "float32")
        [result] = generate(capsys, output, *arguments)
        assert tuple(result["token_ids"]) == trace.generated
        [plain] = generate(capsys, output, *arguments, "--plain")
        assert plain["token_ids"] == result["token_ids"]


def test_conversion_summary_as_json_and_up_to_date(capsys, models, bundle):
    arguments = ["--adapter", "tiny", "--models", str(models), "--output", str(bundle), *SIZES, "--json"]
    assert ss_convert(arguments) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["seconds"] == {} and "up to date" in facts["notes"][0]
    assert facts["bytes"]["coreml/tiny-base.mlpackage"] > 0
    assert facts["parameters"]["tiny"]["stream_embeddings"] == 3 * 32


def test_one_target_alone(capsys, models, tmp_path):
    arguments = ["--adapter", "tiny", "--models", str(models), *SIZES, "--no-golden"]
    assert ss_convert([*arguments, "--target", "mlx", "--output", str(tmp_path / "mlx")]) == 0
    assert not (tmp_path / "mlx" / "coreml").exists()
    assert open_bundle(tmp_path / "mlx").adapter().coreml is None
    assert "left out" in capsys.readouterr().out


def test_demo_tour(capsys, monkeypatch, models, tmp_path):
    monkeypatch.setenv("SS_MODELS", str(models))
    rows = tmp_path / "demo.jsonl"
    rows.write_text('{"prompt": "one", "answer": "SELECT 1"}\n{"prompt": "two"}\n')
    arguments = ["--adapter", "tiny", "--input", str(rows), "--output", str(tmp_path / "tiny")]
    assert demo.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "SELECT 1" in shown and "the same tokens as mlx's: yes" in shown and "passed" in shown
    assert "plain s" in shown and "the same tokens with drafts and without: yes" in shown
