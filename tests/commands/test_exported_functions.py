"""`ss-convert --target mlxfn`: written, checked, listed, replayed, generated with, extended, refused."""

from __future__ import annotations

import json

import pytest

from ss_convert.command import main as ss_convert
from ss_device.bundle import open_bundle
from ss_runtime.commands.generate import main as ss_generate
from ss_runtime.commands.validate import main as ss_validate
from tests.commands.conftest import PROMPTS, SIZES


@pytest.fixture(scope="module")
def exported(models, tmp_path_factory):
    output = tmp_path_factory.mktemp("mlxfn") / "tiny"
    options = ("--target", "mlxfn", "--mlxfn-dtype", "float32", "--keep", "9")
    assert (
        ss_convert(
            ["--adapter", "tiny", "--models", str(models), "--output", str(output), *SIZES, *options]
        )
        == 0
    )
    return output


def answer(capsys, bundle, backend):
    assert (
        ss_generate(["--bundle", str(bundle), "--prompt", PROMPTS[0], "--backend", backend, "--json"]) == 0
    )
    return json.loads(capsys.readouterr().out)["token_ids"]


def test_manifest_tokens_and_golden_traces(capsys, exported):
    functions = open_bundle(exported, verify=True).adapter().mlxfn
    assert (functions.num_nodes, functions.num_kept, functions.dtype) == (12, 9, "float32")
    assert functions.context == 96 and functions.chunk == 16
    assert answer(capsys, exported, "mlxfn") == answer(capsys, exported, "mlx")
    assert ss_validate([str(exported), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(r["backend"], r["dtype"], r["passed"]) for r in report["results"]] == [
        ("mlx", "float32", True),
        ("mlxfn", "float32", True),
    ]


def test_what_does_not_fit_is_refused(refuses, exported, bundle):
    ask = ("--prompt", "a", "--backend", "mlxfn")
    refuses(ss_generate, "--bundle", bundle, *ask, says=("no exported functions", "--target mlxfn"))
    says = ("exported in float32, not in float16",)
    refuses(ss_generate, "--bundle", exported, *ask, "--dtype", "float16", says=says)
    refuses(ss_generate, "--bundle", exported, *ask, "--temp", "1", says=("greedily",))


def test_a_wrong_export_is_caught(refuses, models, tmp_path, monkeypatch):
    """The check compares with the runtime: a graph that ignores the streams' order must not pass."""
    import mlx.core as mx

    from ss_runtime.mlx.function_export import InputMask

    right = InputMask.rows

    def wrong(mask, among):
        return right(mask, mx.eye(among.shape[0], dtype=mx.bool_))

    monkeypatch.setattr(InputMask, "rows", wrong)
    options = ("--target", "mlxfn", "--mlxfn-dtype", "float32", "--no-golden", *SIZES)
    arguments = ("--adapter", "tiny", "--models", models, "--output", tmp_path / "out", *options)
    refuses(ss_convert, *arguments, says=("exported functions", "other stream logits"))
    assert not (tmp_path / "out").exists()
