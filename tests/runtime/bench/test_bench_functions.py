"""`ss-bench run` on back ends that run a bundle's functions: MLX's tokens and drafts; what is refused."""

from __future__ import annotations

import json

import pytest

from ss_runtime.bench import methods
from ss_runtime.bench.report import read_result
from ss_runtime.commands.bench import main
from tests.runtime.bundles import FUNCTION_BACKENDS

OURS = ("plain", "ss", "ss-lookup", "prompt-lookup")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text('{"prompt": "Hello"}\n{"prompt": "the same, the same"}\n')
    return file


@pytest.fixture
def run(function_bundle, rows, tmp_path, monkeypatch, capsys):
    """Measure on a back end → (result, what was printed, the tokens of every run of ours)."""
    call, tokens = methods.OurMethod.__call__, []

    def kept(self, prompt, max_tokens):
        found = call(self, prompt, max_tokens)
        tokens.append(found.tokens)
        return found

    monkeypatch.setattr(methods.OurMethod, "__call__", kept)

    def measured(adapter, backend, *options):
        tokens.clear()
        output = tmp_path / f"{adapter}-{backend}.json"
        command = ["run", function_bundle.path, "--adapter", adapter, "--input", rows, "--max-tokens", 9]
        command += ["--backend", backend, "--dtype", "float32", "--output", output, *options]
        assert main([str(part) for part in command]) == 0
        return read_result(output), capsys.readouterr().out, list(tokens)

    return measured


@pytest.mark.parametrize("adapter", ["two", "v1", "v2"])
@pytest.mark.parametrize("backend", FUNCTION_BACKENDS)
def test_tokens_and_drafts_are_those_of_mlx(run, adapter, backend):
    found, printed, tokens = run(adapter, backend)
    expected, _, theirs = run(adapter, "mlx")
    assert tokens == theirs and len(tokens) == 3 * len(OURS)
    assert (found["backend"], found["dtype"]) == (backend, "float32")
    assert f"2 prompts, {backend} in float32, " in printed and "not measured" in printed
    assert tuple(found["methods"]) == OURS
    for name, ours in found["methods"].items():
        assert ours["token_exact"] == 2 and ours["acceptance"] == expected["methods"][name]["acceptance"]
        assert ours["held_bytes"] is ours["peak_bytes"] is None
        assert expected["methods"][name]["peak_bytes"] > 0


@pytest.mark.parametrize("backend", FUNCTION_BACKENDS)
def test_other_libraries_measure_beside_it(run, backend, half_base):
    """On the same weights: the untouched base says what a lossless adapter does."""
    libraries = ("mlx-lm", "hf", "hf-prompt-lookup")
    options = ("--methods", ",".join(("plain", *libraries)), "--base", half_base.path)
    found, _, _ = run("one", backend, *options)
    assert [found["methods"][name]["token_exact"] for name in libraries] == [2, 2, 2]
    held = [found["methods"][name]["peak_bytes"] is not None for name in ("plain", *libraries)]
    assert held == [False, True, False, False]


def test_results_of_two_back_ends_are_told_apart(run, tmp_path, capsys):
    for backend in ("executor", "mlx"):
        run("one", backend, "--methods", "plain")
    old = json.loads((tmp_path / "one-mlx.json").read_text())
    del old["backend"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    for before, after, differs in (("one-executor", "one-mlx", True), ("old", "one-mlx", False)):
        assert main(["compare", *(str(tmp_path / f"{name}.json") for name in (before, after))]) == 0
        assert ("backend differs: executor / mlx" in capsys.readouterr().out) == differs


def test_what_does_not_go_together_is_one_line(function_bundle, rows, tmp_path, capsys):
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "a" * 100}) + "\n")
    for options, says in (
        (("--kv-bits", "8"), "back end 'executor' keeps keys and values as they are: leave --kv-bits out"),
        (("--compute-units", "cpu"), "--compute-units is for back ends"),
        (("--dtype", "bfloat16"), "does not compute in bfloat16"),
        (
            ("--methods", "plain,ss-tuned"),
            "chooses for MLX, not for back end 'executor': leave 'ss-tuned' out",
        ),
        (("--input", str(long)), "long.jsonl:1: the prompt has 101 tokens, the context holds 96"),
        (("--backend", "mlxfn"), "invalid choice: 'mlxfn'"),
    ):
        command = ["run", str(function_bundle.path), "--adapter", "two", "--input", str(rows)]
        assert main([*command, "--backend", "executor", *options]) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1, error
