"""ss-train: every sub-command once on a tiny base, and one line for each kind of bad input."""

from __future__ import annotations

import json

import pytest

from ss_device.adapter import load_adapter
from ss_device.training.command import main
from tests.tiny_models import make_tiny_base

SETTINGS = json.dumps(
    {"num_streams": 2, "num_msa_layers": 2, "stream_mlp": "base", "stream_lora_rank": 2,
     "stream_lora_alpha": 4, "markov_rank": 4}
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("train")
    make_tiny_base(root / "base")
    rows = [{"question": f"q{i}?", "context": "CREATE TABLE t", "answer": f"SELECT {i}"} for i in range(30)]
    (root / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return root


def test_distill_adapter_evaluate(folder, capsys):
    base, own, output = str(folder / "base"), str(folder / "own.jsonl"), folder / "adapter"
    assert main(["distill", "sqlctx", "--base", base, "--data", str(folder / "rows.jsonl"),
                 "--output", own, "--limit", "20", "--max-tokens", "8"]) == 0  # fmt: skip
    assert main(["adapter", "sqlctx", "--base", base, "--data", own, "--settings", SETTINGS,
                 "--output", str(output), "--epochs", "1", "--tokens-per-batch", "256",
                 "--golden-prompts", str(folder / "rows.jsonl")]) == 0  # fmt: skip
    assert load_adapter(output).config.markov_rank == 4
    assert (output / "golden_prompts.jsonl").is_file()
    capsys.readouterr()
    results = {}
    for shape, nodes in (("best-first", "6"), ("best-first", "1"), ("k-ary", "7")):
        assert main(["evaluate", str(output), "--base", base, "--data", str(folder / "rows.jsonl"),
                     "--limit", "4", "--max-tokens", "6", "--nodes", nodes, "--shape", shape,
                     "--top-k", "2", "--json"]) == 0  # fmt: skip
        results[shape, nodes] = json.loads(capsys.readouterr().out)
    plain = results["best-first", "1"]
    assert plain["tokens_per_call"] == 1.0 and plain["prompts"] == 4
    assert len({r["exact_match"] for r in results.values()}) == 1
    assert len({r["tokens"] for r in results.values()}) == 1
    assert plain["parameters"]["parent_bias"] == 2 * 4 * 300


def bad_inputs(folder):
    data, base = str(folder / "rows.jsonl"), str(folder / "base")
    out = str(folder / "never")
    adapter = ["adapter", "--base", base, "--output", out, "--settings", SETTINGS]
    paper = adapter[:-2]
    (folder / "field.jsonl").write_text(
        '{"question": "a", "context": "b", "answer": "c"}\n{"question": "a"}\n'
    )
    (folder / "broken.jsonl").write_text('{"question": \n')
    (folder / "empty.jsonl").write_text("\n")
    yield [*adapter, "nosuch", "--data", data], "unknown application 'nosuch' (found: dialogsum"
    yield [*adapter, "sqlctx", "--data", str(folder / "field.jsonl")], "field.jsonl:2"
    yield [*adapter, "sqlctx", "--data", str(folder / "broken.jsonl")], "broken.jsonl:1"
    yield [*adapter, "sqlctx", "--data", str(folder / "empty.jsonl")], "no rows"
    yield [*paper, "sqlctx", "--data", data, "--settings", "best"], "settings 'best'"
    yield [*paper, "sqlctx", "--data", data, "--settings", '{"gamma": 4}'], "'gamma'"
    yield [*paper, "sqlctx", "--data", data, "--settings", '{"num_streams": 0}'], "num_streams 0"
    yield [*paper, "sqlctx", "--data", data], "num_msa_layers 4 exceeds the base model's 3 layers"
    yield (
        [*adapter, "sqlctx", "--data", data, "--max-length", "3"],
        "fits into 3 tokens",
    )
    yield ["distill", "sqlctx", "--base", out, "--data", data, "--output", out], "no such base model folder"
    yield ["evaluate", out, "--base", base, "--data", data], "no such file"
    yield ["base", str(folder / "none.toml"), "--data", base, "--output", out], "no such recipe"
    yield ["adapter", "sqlctx"], "required"


def test_bad_input_is_one_line_and_exit_code_2(folder, capsys):
    for arguments, words in bad_inputs(folder):
        assert main(arguments) == 2, arguments
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ") and captured.err.count("\n") == 1, captured.err
        assert words in captured.err
    assert not (folder / "never").exists()
