"""Exported functions, imported again: the runtime's tokens, kept nodes and drafts, call by call."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from ss_device.decoding import Drafter, decode
from ss_device.errors import UserError
from ss_runtime.mlx.function_export import export_functions, functions_of
from ss_runtime.mlx.function_model import FunctionModel
from ss_runtime.samplers import build_sampler
from tests.runtime.mlx_cases import CONFIGS, PROMPT, SHARED, mlx_model
from tests.tiny_models import VOCAB, random_adapter

CASES = [
    (CONFIGS["paper"], 8, "float32"),
    (CONFIGS["paper"], 5, "float32"),
    (CONFIGS["rich"], 6, "float32"),
    (CONFIGS["bare"], 8, "float16"),
    (SHARED[False], 8, "float32"),
    (SHARED[True], 8, "float32"),
]


def exported(base, adapter, num_kept, dtype, path):
    """The runtime's model and the one of the file that was made from its weights."""
    model = mlx_model(base, adapter, dtype=dtype, num_kept=num_kept, context=64, stream_rows="kept")
    functions = functions_of(
        "tiny",
        adapter.config,
        num_nodes=8,
        num_kept=num_kept,
        prune_over="draft",
        context=64,
        chunk=4,
        dtype=dtype,
    )
    export_functions(model.decoder, functions, getattr(mx, dtype), path)
    a = base.architecture
    shape = a.num_layers, a.num_kv_heads, a.head_dim
    return model, FunctionModel(path, functions, adapter.config, shape, a.vocab_size)


@pytest.mark.parametrize(("config", "num_kept", "dtype"), CASES)
def test_token_for_token_the_runtime(mlx_base, tmp_path, config, num_kept, dtype):
    model, functions = exported(
        mlx_base, random_adapter(mlx_base, config), num_kept, dtype, tmp_path / "tiny.mlxfn"
    )
    scale = {"float32": 1e-4, "float16": 2e-2}[dtype]
    for drafter in (Drafter(8), Drafter(1), Drafter(5, "chain")):
        ours, theirs = (list(decode(m, drafter, PROMPT, 20)) for m in (model, functions))
        assert [s.tokens for s in ours] == [s.tokens for s in theirs]
        assert [s.path for s in ours] == [s.path for s in theirs]
        for a, b in zip(ours[1:], theirs[1:], strict=True):
            assert a.verified.kept.tolist() == b.verified.kept.tolist()
            limit = scale * np.abs(a.verified.stream_logits).max()
            assert np.abs(a.verified.stream_logits - b.verified.stream_logits).max() <= limit


def test_a_text_up_to_the_end_of_the_context(mlx_base, tmp_path):
    adapter = random_adapter(mlx_base, CONFIGS["paper"])
    model, functions = exported(mlx_base, adapter, 8, "float32", tmp_path / "tiny.mlxfn")
    ours, theirs = (
        [t for s in decode(m, Drafter(8), PROMPT, 100) for t in s.tokens] for m in (model, functions)
    )
    assert ours == theirs and len(ours) == 64 - len(PROMPT) + 1


def test_weights_are_stored_once(mlx_base, tmp_path):
    path = tmp_path / "tiny.mlxfn"
    model, _ = exported(mlx_base, random_adapter(mlx_base, CONFIGS["paper"]), 8, "float32", path)
    from mlx.utils import tree_flatten

    weights = sum(array.nbytes for _, array in tree_flatten(model.decoder.parameters()))
    assert weights <= path.stat().st_size < 2 * weights


def test_what_a_file_cannot_do_is_said(mlx_base, tmp_path):
    path = tmp_path / "tiny.mlxfn"
    adapter = random_adapter(mlx_base, CONFIGS["paper"])
    _, functions = exported(mlx_base, adapter, 8, "float32", path)
    with pytest.raises(UserError, match="greedily"):
        next(decode(functions, Drafter(8), PROMPT, 5, sampler=build_sampler(0.7, {"seed": 1})))
    path.write_bytes(path.read_bytes()[:30])
    with pytest.raises(UserError, match="not a readable MLX function"):
        FunctionModel(path, functions._functions, adapter.config, (3, 2, 8), VOCAB)
