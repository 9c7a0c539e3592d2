"""`ss-bench tune`: which draft pays on this device, plain decoding among the candidates.

Tokens per call come from decoding the prompts, seconds per model call from steps timed in turns at one
context length, seconds of drafting from the same decoding runs. What is predicted is their quotient.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from ss_device.decoding import Drafter, StepModel, decode
from ss_device.tree import tree_from_parents
from ss_runtime.bench.methods import TimedModel
from ss_runtime.tuning import DraftChoice


def candidates(num_nodes: int) -> list[DraftChoice]:
    """Plain decoding, then every shape at powers of two up to the bundle's nodes."""
    sizes = sorted({1 << power for power in range(1, 12) if 1 << power < num_nodes} | {num_nodes} - {1})
    found = [DraftChoice(1)]
    for size in sizes:
        for lookup in (False, True):
            found += [DraftChoice(size, "best-first", lookup), DraftChoice(size, "chain", lookup)]
    return found


def step_seconds(model: StepModel, sizes: Sequence[int], context: int, rounds: int) -> dict[int, float]:
    """Median seconds of a step per tree size behind `context` tokens; sizes in turns, up and down."""
    model.prefill([1] * context)
    trees = {n: tree_from_parents([1] * n, [-1] + [0] * (n - 1)) for n in sizes}
    taken: dict[int, list[float]] = {n: [] for n in sizes}
    for round_number in range(rounds + 1):
        for size in list(sizes) if round_number % 2 else list(sizes)[::-1]:
            start = time.perf_counter()
            model.step(trees[size])
            if round_number:  # the first one warms up
                taken[size].append(time.perf_counter() - start)
    return {size: float(np.median(seconds)) for size, seconds in taken.items()}


def tune(
    models: Callable[[int], StepModel],
    parent_bias,
    num_nodes: int,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    stop_ids: frozenset[int],
    rounds: int = 9,
    report: Callable[[str], None] = lambda text: None,
) -> tuple[DraftChoice, list[dict]]:
    """The candidate with the most predicted tokens per second, and the evidence for all of them.

    models: nodes per call → the step model that is fastest for it (plain decoding needs no streams).
    """
    context = int(np.median([len(p) for p in prompts]))
    wanted = candidates(num_nodes)
    drafting, plain = models(num_nodes), models(1)
    seconds = step_seconds(drafting, sorted({c.num_nodes for c in wanted} - {1}), context, rounds)
    seconds |= step_seconds(plain, [1], context, rounds)
    evidence = []
    for choice in wanted:
        model = TimedModel(plain if choice.num_nodes == 1 else drafting)
        per_call, draft_seconds = _tokens_per_call(
            model, choice.drafter(parent_bias), prompts, max_tokens, stop_ids
        )
        rate = per_call / (seconds[choice.num_nodes] + draft_seconds)
        evidence.append(
            {
                "nodes": choice.num_nodes,
                "shape": choice.shape,
                "lookup": choice.lookup,
                "tokens_per_call": round(per_call, 4),
                "step_seconds": round(seconds[choice.num_nodes], 6),
                "draft_seconds": round(draft_seconds, 6),
                "tokens_per_second": round(rate, 3),
            }
        )
        report(choice.label())
    best = max(range(len(wanted)), key=lambda i: evidence[i]["tokens_per_second"])
    return wanted[best], evidence


def _tokens_per_call(
    model: TimedModel, drafter: Drafter, prompts, max_tokens: int, stop_ids: frozenset[int]
) -> tuple[float, float]:
    """Tokens per call after the prompt's, and the host's seconds per call beside the model's."""
    tokens = calls = 0
    host = 0.0
    for prompt in prompts:
        steps = decode(model, drafter, prompt, max_tokens, stop_ids)
        next(steps)
        start = time.perf_counter()
        records = list(steps)
        host += time.perf_counter() - start - sum(model.seconds)
        tokens += sum(len(record.tokens) for record in records)
        calls += len(records)
    return tokens / max(calls, 1), host / max(calls, 1)
