"""Exported functions beside the runtime on the same weights: the check of a conversion."""

from __future__ import annotations

import numpy as np

from ss_device.bundle import Bundle, BundledAdapter
from ss_device.decoding import Drafter
from ss_device.step_model import Proposal
from ss_runtime.mlx.function_export import settings_of_functions
from ss_runtime.mlx.function_model import open_functions
from ss_runtime.mlx.loading import load_model

LOGIT_LIMIT = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}


def first_difference(bundle: Bundle, adapter: BundledAdapter, calls: int) -> str | None:
    """How the file's first calls differ from those of the runtime on the same weights; None: not at all.

    A made-up prompt longer than a chunk, then the runtime's drafts, whose accepted nodes both commit. In
    half precision the comparison ends where one of them alone keeps or accepts a node (a near tie).
    """
    functions = adapter.mlxfn
    runtime = load_model(bundle, adapter, settings_of_functions(functions))
    exported, drafter = open_functions(bundle, adapter), Drafter(functions.num_nodes)
    room = functions.context - (calls + 1) * functions.num_nodes
    vocab = bundle.manifest.architecture.vocab_size
    prompt = np.random.default_rng(0).integers(0, vocab, max(1, min(functions.chunk + 3, room))).tolist()
    ours, theirs = runtime.prefill(prompt), exported.prefill(prompt)
    if not _close(ours.stream_logits, theirs.stream_logits, functions.dtype):
        return "other stream logits after the prompt"
    proposal = ours
    for call in range(1, calls + 1):
        tree = drafter.grow(proposal, frozenset(), functions.num_nodes)
        ours, theirs = runtime.step(tree), exported.step(tree)
        same = ours.accepted_node == theirs.accepted_node and ours.kept.tolist() == theirs.kept.tolist()
        if not same:
            return f"call {call} keeps or accepts other nodes" if functions.dtype == "float32" else None
        if not _close(ours.stream_logits, theirs.stream_logits, functions.dtype):
            return f"other stream logits in call {call}"
        path = tree.path(ours.accepted_node)
        for model in (runtime, exported):
            model.commit(path)
        chosen = ours.chosen[np.searchsorted(ours.kept, ours.accepted_node)]
        proposal = Proposal(int(chosen), ours.stream_logits)
    return None


def _close(ours: np.ndarray, theirs: np.ndarray, dtype: str) -> bool:
    """Equal but for rounding: a share of the largest logit."""
    limit = LOGIT_LIMIT[dtype] * np.abs(ours).max()
    return ours.shape == theirs.shape and bool(np.abs(ours - theirs).max() <= limit)
