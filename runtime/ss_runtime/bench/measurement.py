"""Interleaved runs of several methods over the same prompts, and what they add up to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ss_device.evaluation.acceptance import AcceptanceCounts
from ss_runtime.bench.device_memory import MemoryLedger
from ss_runtime.bench.methods import Method, Run

# Of every run, in the order of the prompts (then of the repeats): what `runs` in a result holds.
RUN_COLUMNS = ("tokens", "seconds", "first_token_seconds", "calls", "model_seconds", "token_exact")


@dataclass
class Series:
    """All counted runs of one method, in the order of the prompts (then of the repeats).

    held_bytes, peak_bytes: of `MemoryLedger`, after the warm-up and at most; None for methods outside MLX.
    """

    runs: list[Run] = field(default_factory=list)
    held_bytes: int | None = None
    peak_bytes: int | None = None


def interleave(
    methods: dict[str, Method],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    repeats: int = 1,
    report: Callable[[str], None] = lambda text: None,
    memory: MemoryLedger | None = None,
) -> dict[str, Series]:
    """Run every method on every prompt, A B … then … B A, after one uncounted round on the first.

    What a method learned in the warm-up or an earlier repeat (`Method.forget`) is forgotten: no prompt is
    counted that it has seen. memory: where opening the methods was accounted.
    """
    memory = memory or MemoryLedger()
    for name, method in methods.items():
        with memory.account(name, counted=False):
            method(prompts[0], max_tokens)
    series = {name: Series(held_bytes=memory.held.get(name)) for name in methods}
    forward = True
    for _ in range(repeats):
        for method in methods.values():
            getattr(method, "forget", lambda: None)()
        for prompt in prompts:
            for name in list(methods) if forward else list(methods)[::-1]:
                with memory.account(name):
                    series[name].runs.append(methods[name](prompt, max_tokens))
                report(name)
            forward = not forward
    for name, one in series.items():
        one.peak_bytes = memory.peaks.get(name)
    return series


def summarize(series: dict[str, Series], baseline: str = "plain") -> dict[str, dict]:
    """Figures per method (docs/benchmark.md). Ratios are against `baseline` on the same prompts."""
    base = series.get(baseline)
    return {name: _summary(one, base) for name, one in series.items()}


def _summary(one: Series, base: Series | None) -> dict:
    runs = one.runs
    end_to_end = [len(r.tokens) / r.seconds for r in runs]
    decoded = [(len(r.tokens) - 1) / (r.seconds - r.first_token) for r in runs if _decoded(r)]
    found = {
        "runs": _rows(one, base),
        "totals": _totals(runs),
        "first_token_seconds": _spread([r.first_token for r in runs if r.first_token is not None]),
        "decode_tokens_per_second": _spread(decoded),
        "end_to_end_tokens_per_second": _spread(end_to_end),
        "step_seconds": _spread([s for r in runs for s in r.model_seconds]),
        "held_bytes": one.held_bytes,
        "peak_bytes": one.peak_bytes,
    }
    if any(r.steps for r in runs):
        found["acceptance"] = _acceptance(runs)
    return found | (_against(one, base) if base is not None else {})


def _rows(one: Series, base: Series | None) -> list[list]:
    """Every run's figures (RUN_COLUMNS); token_exact is None without a baseline."""
    exact = [r.tokens == b.tokens for r, b in zip(one.runs, base.runs, strict=True)] if base else None
    return [
        [
            len(run.tokens),
            round(run.seconds, 5),
            None if run.first_token is None else round(run.first_token, 5),
            len(run.model_seconds),
            round(sum(run.model_seconds), 5),
            None if exact is None else exact[index],
        ]
        for index, run in enumerate(one.runs)
    ]


def _totals(runs: list[Run]) -> dict:
    """Over all runs together: rates as sums over sums, means per model call after the prompt's.

    host_seconds_per_call: what decoding took beside the model's steps, by the methods that tell both.
    """
    seconds, timed = sum(r.seconds for r in runs), [r for r in runs if _decoded(r)]
    decoding = sum(r.seconds - r.first_token for r in timed)
    calls, in_model = sum(len(r.model_seconds) for r in runs), sum(sum(r.model_seconds) for r in runs)
    return {
        "tokens": sum(len(r.tokens) for r in runs),
        "seconds": round(seconds, 5),
        "tokens_per_second": round(sum(len(r.tokens) for r in runs) / seconds, 4),
        "decode_tokens_per_second": round(sum(len(r.tokens) - 1 for r in timed) / decoding, 4)
        if timed
        else None,
        "calls": calls or None,
        "mean_step_seconds": round(in_model / calls, 7) if calls else None,
        "host_seconds_per_call": round((decoding - in_model) / calls, 7) if calls else None,
    }


def _acceptance(runs: list[Run]) -> dict:
    counts = AcceptanceCounts()
    for run in runs:
        for step in run.steps:
            counts.add(step.tree, step.path, len(step.tokens), len(step.verified.kept))
    summary = counts.summary()
    return {k: summary[k] for k in ("calls", "tokens_per_call", "rows_per_call", "acceptance_by_depth")}


def _against(one: Series, base: Series) -> dict:
    """Ratios to the baseline: spreads over prompts, and of the totals."""
    pairs = list(zip(one.runs, base.runs, strict=True))
    decoded = [(r, b) for r, b in pairs if _decoded(r) and _decoded(b)]
    mine, others = _totals(one.runs), _totals(base.runs)
    found = {
        "token_exact": sum(r.tokens == b.tokens for r, b in pairs),
        "speedup_end_to_end": _ratio(pairs, lambda r: r.seconds / len(r.tokens)),
        "speedup_decode": _ratio(decoded, lambda r: (r.seconds - r.first_token) / (len(r.tokens) - 1)),
        "total_speedup_end_to_end": _quotient(mine, others, "tokens_per_second"),
        "total_speedup_decode": _quotient(mine, others, "decode_tokens_per_second"),
        "mean_step_cost_ratio": _quotient(mine, others, "mean_step_seconds"),
    }
    steps, base_steps = ([s for r in each.runs for s in r.model_seconds] for each in (one, base))
    if steps and base_steps:
        found["step_cost_ratio"] = round(float(np.median(steps) / np.median(base_steps)), 4)
    return found


def _quotient(mine: dict, others: dict, key: str) -> float | None:
    return round(mine[key] / others[key], 4) if mine[key] and others[key] else None


def _decoded(run: Run) -> bool:
    return run.first_token is not None and len(run.tokens) > 1


def _ratio(pairs: list[tuple[Run, Run]], seconds_per_token: Callable[[Run], float]) -> dict | None:
    """Spread over prompts of baseline seconds per token / this method's."""
    return _spread([seconds_per_token(b) / seconds_per_token(r) for r, b in pairs])


def _spread(values) -> dict | None:
    """Median with 10th and 90th percentile; None without values."""
    if len(values) == 0:
        return None
    low, middle, high = np.percentile(np.asarray(values, float), [10, 50, 90])
    return {"median": round(float(middle), 6), "p10": round(float(low), 6), "p90": round(float(high), 6)}
