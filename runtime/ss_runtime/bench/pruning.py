"""Cost and tokens per call of pruning N nodes to K on this device."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ss_device.decoding import Drafter, decode
from ss_device.tree import tree_from_parents
from ss_runtime.mlx.step_model import MLXStepModel


def kept_sizes(num_nodes: int) -> list[int]:
    """Kept nodes that are measured: a half and a quarter of the tree."""
    return sorted({k for k in (num_nodes // 2, num_nodes // 4) if k}, reverse=True)


def measure_pruned(model: MLXStepModel, context: int, rounds: int) -> list[dict]:
    """Median seconds of a step of all nodes behind `context` tokens: `nodes`, `kept`, `step_seconds` and
    `unpruned_step_seconds`, measured in the same turns. The model keeps all nodes afterwards."""
    nodes = model.limits.num_nodes
    options = {"defer": True} if model.limits.defers_streams else {}
    model.prefill([1] * context)
    tree = tree_from_parents([1] * nodes, [-1] + [0] * (nodes - 1))
    taken: dict[int, list[float]] = {kept: [] for kept in (nodes, *kept_sizes(nodes))}
    for order in (list(taken), list(taken)[::-1]):
        for kept in order:
            model.keep(kept)
            model.step(tree, **options)  # warms up, and is traced where steps are compiled
            for _ in range(rounds):
                start = time.perf_counter()
                model.step(tree, **options)
                taken[kept].append(time.perf_counter() - start)
    model.keep(nodes)
    unpruned = float(np.median(taken.pop(nodes)))
    return [
        {
            "nodes": nodes,
            "kept": kept,
            "step_seconds": round(float(np.median(seconds)), 6),
            "unpruned_step_seconds": round(unpruned, 6),
        }
        for kept, seconds in taken.items()
    ]


def decoded_tokens_per_call(
    model: MLXStepModel,
    kept: int,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    stop_ids: frozenset[int],
) -> float:
    """Tokens per call of decoding the prompts with so many nodes kept, which only the model can tell."""
    tokens = calls = 0
    model.keep(kept)
    try:
        for prompt in prompts:
            steps = list(decode(model, drafter, prompt, max_tokens, stop_ids))
            tokens += sum(len(step.tokens) for step in steps) - 1
            calls += len(steps) - 1
    finally:
        model.keep(model.limits.num_nodes)
    return tokens / max(calls, 1)
