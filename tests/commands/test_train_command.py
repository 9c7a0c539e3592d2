"""ss-train: every sub-command once on a tiny base, and one line for each kind of bad input."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from ss_device.adapter import load_adapter
from ss_device.training.command import main
from tests.tiny_models import TINY_RECIPE, make_tiny_base

SETTINGS = json.dumps(
    {"num_streams": 2, "num_msa_layers": 2, "stream_mlp": "base", "stream_lora_rank": 2,
     "stream_lora_alpha": 4, "bigram_rank": 4}
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
    assert load_adapter(output).config.bigram_rank == 4
    assert (output / "golden_prompts.jsonl").is_file()
    capsys.readouterr()
    results = {}
    for shape, nodes in (("best-first", "6"), ("best-first", "1"), ("k-ary", "7")):
        assert main(["evaluate", str(output), "--base", base, "--data", str(folder / "rows.jsonl"),
                     "--limit", "4", "--max-tokens", "6", "--nodes", nodes, "--shape", shape,
                     "--tree-top-k", "2", "--json"]) == 0  # fmt: skip
        results[shape, nodes] = json.loads(capsys.readouterr().out)
    plain = results["best-first", "1"]
    assert plain["tokens_per_call"] == 1.0 and plain["prompts"] == 4
    assert len({r["exact_match"] for r in results.values()}) == 1
    assert len({r["tokens"] for r in results.values()}) == 1
    assert plain["parameters"]["bigram_bias"] == 2 * 4 * 300


def test_shared_bigram_bias_and_replay(folder, capsys):
    base, rows = str(folder / "base"), str(folder / "rows.jsonl")
    own, bias, output = str(folder / "own_2.jsonl"), folder / "bias.safetensors", folder / "sharing"
    assert main(["distill", "sqlctx", "--base", base, "--data", rows,
                 "--output", own, "--limit", "20", "--max-tokens", "8"]) == 0  # fmt: skip
    assert main(["bigram-bias", f"sqlctx={own}", "--base", base, "--rank", "4", "--epochs", "3",
                 "--output", str(bias)]) == 0  # fmt: skip
    assert main(["adapter", "sqlctx", "--base", base, "--data", own, "--settings", SETTINGS,
                 "--set", "bigram_shared=true", "--set", "num_streams=3", "--bigram-bias", str(bias),
                 "--output", str(output), "--epochs", "1", "--tokens-per-batch", "256"]) == 0  # fmt: skip
    adapter = load_adapter(output)
    assert adapter.config.num_streams == 3
    np.testing.assert_array_equal(adapter.tensors["bigram.u"], load_file(bias)["bigram.u"])
    capsys.readouterr()
    trees = ["best-first:6", "best-first+lookup:6", "chain:3:1", "best-first:1"]
    assert main(["replay", str(output), "--base", base, "--data", rows, "--limit", "4", "--json",
                 "--max-tokens", "6", "--continuations", str(folder / "test_own.jsonl"),
                 *(word for tree in trees for word in ("--tree", tree))]) == 0  # fmt: skip
    result = json.loads(capsys.readouterr().out)
    assert list(result["trees"]) == trees
    assert result["trees"]["best-first:1"]["tokens_per_call"] == 1.0
    assert len(result["trees"]["chain:3:1"]["acceptance_by_depth"]) <= 1
    assert result["parameters"]["shared_bigram_bias"] == 2 * 4 * 300
    assert result["parameters"]["bigram_bias"] == 0


def test_distill_leaves_out_long_prompts(folder):
    rows, output = folder / "one_long.jsonl", folder / "short_ones.jsonl"
    long = {"question": "why " * 40, "context": "CREATE TABLE t", "answer": "SELECT 1"}
    rows.write_text((folder / "rows.jsonl").read_text() + json.dumps(long) + "\n")
    command = ["distill", "sqlctx", "--base", str(folder / "base"), "--data", str(rows),
               "--output", str(output), "--max-tokens", "2", "--longest-prompt"]  # fmt: skip
    assert main([*command, "60"]) == 0
    made = [json.loads(line)["prompt"] for line in output.read_text().splitlines()]
    assert len(made) == 30 and not any("why" in prompt for prompt in made)
    assert main([*command, "2"]) == 2


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
    good = [*adapter, "sqlctx", "--data", data]
    few_streams = '{"num_streams": 9, "num_msa_layers": 2, "pruning_rank": -1}'
    yield [*paper, "sqlctx", "--data", data, "--settings", few_streams], "pruning_rank must not be negative"
    yield [*paper, "sqlctx", "--data", data, "--settings", '{"num_msa_layers": 0}'], "num_msa_layers 0"
    yield (
        [*paper, "sqlctx", "--data", data, "--settings", '{"num_streams": 256, "num_msa_layers": 2}'],
        "num_streams 256 must be below the base model's context of 256",
    )
    yield [*good, "--max-length", "257"], "--max-length 257 exceeds the base model's context of 256"
    yield [*good, "--device", "cuda"], "--device cuda: PyTorch"
    yield ["score", "sqlctx", "--base", base, "--data", data, "--device", "cuda"], "finds none here"
    yield ["evaluate", out, "--base", base, "--data", data, "--device", "gpu"], "invalid choice: 'gpu'"
    yield [*good, "--quantize-base", "int3"], "quantize_base 'int3' is not one of nf4"
    yield [*good, "--precision", "fp8"], "precision 'fp8' is not one of fp32, bf16"
    yield [*good, "--pruning", "never"], "pruning 'never' is not one of joint, after"
    yield [*good, "--pruning", "after"], "needs a trained adapter to start from"
    yield [*good, "--patience", "2", "--evaluate-every", "0"], "patience needs evaluate_every"
    yield [*good, "--segment", "0"], "0 is not at least 1"
    yield [*good, "--stream-weight", "-1"], "stream_weight -1.0 must not be negative"
    yield [*good, "--depth-decay", "0"], "depth_decay 0.0 must be above 0"
    yield [*good, "--epochs", "0"], "epochs 0.0 must be above 0"
    yield ["distill", "sqlctx", "--base", out, "--data", data, "--output", out], "no such base model folder"
    yield ["evaluate", out, "--base", base, "--data", data], "no such file"
    yield ["base", str(folder / "none.toml"), "--data", base, "--output", out], "no such recipe"
    recipe = str(folder / "recipe.toml")
    (folder / "recipe.toml").write_text(TINY_RECIPE)
    train_base = ["base", recipe, "--data", str(folder), "--output", out]
    yield train_base, "recipe 'tiny' has no 'steps': give --steps or --minutes"
    yield [*train_base, "--minutes", "0"], "0 is not above 0"
    yield [*train_base, "--minutes", "soon"], "'soon' is not a number"
    yield [*train_base, "--minutes", "1", "--steps", "2"], "--steps and --minutes exclude each other"
    yield [*train_base[:-1], base, "--steps", "2"], "is not a base model of this command"
    yield [*train_base, "--steps", "2", "--shard-size", "big"], "--shard-size big"
    yield ["adapter", "sqlctx"], "required"
    sql = [*paper, "sqlctx", "--data", data, "--set"]
    yield [*sql, "num_msa_layers"], "expected NAME=VALUE"
    yield [*sql, "num_msa_layers=many"], "'many' is no value"
    yield [*sql, 'num_streams="4"'], "Expected 'int', got 'str' - at 'num_streams'"
    yield [*adapter, "sqlctx", "--data", data, "--set", "bigram_shared=true"], "(--bigram-bias)"
    yield [*adapter, "sqlctx", "--data", data, "--bigram-bias", out], "no such bigram bias file"
    yield ["bigram-bias", data, "--base", base, "--output", out], "is not APP=FILE"
    replay = ["replay", out, "--base", base, "--data", data, "--continuations", out, "--tree"]
    yield [*replay, "best-first"], "tree 'best-first' is not SHAPE:NODES"
    yield [*replay, "round:4"], "tree shape 'round'"


def test_bad_input_is_one_line_and_exit_code_2(folder, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, words in bad_inputs(folder):
        assert main(arguments) == 2, arguments
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ") and captured.err.count("\n") == 1, captured.err
        assert words in captured.err
    assert not (folder / "never").exists()


def test_resume_into_another_configuration(folder, capsys):
    run = ["adapter", "sqlctx", "--base", str(folder / "base"), "--data", str(folder / "rows.jsonl"),
           "--settings", SETTINGS, "--output", str(folder / "other"), "--epochs", "1"]  # fmt: skip
    assert main(run) == 0
    before = (folder / "other" / "speculative.safetensors").read_bytes()
    for change, words in (
        (["--learning-rate", "0.5"], "learning_rate: 0.0005, now 0.5"),
        (["--settings", '{"num_streams": 3, "num_msa_layers": 2}'], "bigram_rank: 4, now 0"),
        (["--limit", "20"], "data: "),
    ):
        capsys.readouterr()
        assert main([*run, *change, "--resume"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and words in error, error
    assert (folder / "other" / "speculative.safetensors").read_bytes() == before
    assert main([*run, "--resume"]) == 0
    assert (folder / "other" / "speculative.safetensors").read_bytes() == before


def test_early_exit_afterwards_and_weights_by_depth(folder, capsys):
    """The parts of the first run stay bit for bit; only the pruning head learns in the second."""
    common = ["adapter", "sqlctx", "--base", str(folder / "base"), "--data", str(folder / "rows.jsonl"),
              "--epochs", "2", "--tokens-per-batch", "256", "--learning-rate", "0.01"]  # fmt: skip
    unpruned = json.dumps({**json.loads(SETTINGS), "pruning_rank": 0})
    first, second = folder / "unpruned", folder / "pruned"
    assert main([*common, "--settings", unpruned, "--output", str(first),
                 "--depth-decay", "0.8", "--stream-weight", "0.5"]) == 0  # fmt: skip
    assert main([*common, "--settings", SETTINGS, "--output", str(second), "--start", str(first),
                 "--pruning", "after", "--evaluate-every", "2", "--patience", "2"]) == 0  # fmt: skip
    before, after = load_adapter(first), load_adapter(second)
    for name, tensor in before.tensors.items():
        np.testing.assert_array_equal(tensor, after.tensors[name])
    assert after.tensors.keys() - before.tensors.keys() == {"pruning.a", "pruning.b"}
    assert np.abs(after.tensors["pruning.b"]).max() > 0
    assert "early" in after.record["final_losses"] and "early" not in before.record["final_losses"]
    assert before.record["depth_decay"] == 0.8
    capsys.readouterr()
