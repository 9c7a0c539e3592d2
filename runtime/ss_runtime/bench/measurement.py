"""Interleaved runs of several methods over the same prompts, and what they add up to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ss_device.evaluation.acceptance import AcceptanceCounts
from ss_runtime.bench.methods import Method, Run


@dataclass
class Series:
    """All counted runs of one method, in the order of the prompts (then of the repeats).

    peak_bytes: most device memory of MLX during its runs, None for methods outside MLX.
    """

    runs: list[Run] = field(default_factory=list)
    peak_bytes: int | None = None


def interleave(
    methods: dict[str, Method],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    repeats: int = 1,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Series]:
    """Run every method on every prompt, A B … then … B A, after one uncounted round on the first."""
    for method in methods.values():
        method(prompts[0], max_tokens)
    series = {name: Series() for name in methods}
    forward = True
    for _ in range(repeats):
        for prompt in prompts:
            for name in list(methods) if forward else list(methods)[::-1]:
                _watch_memory(name, series[name], lambda n=name, p=prompt: methods[n](p, max_tokens))
                report(name)
            forward = not forward
    return series


def _watch_memory(name: str, series: Series, run: Callable[[], Run]) -> None:
    if name.startswith("hf"):
        series.runs.append(run())
        return
    import mlx.core as mx

    mx.reset_peak_memory()
    series.runs.append(run())
    series.peak_bytes = max(series.peak_bytes or 0, mx.get_peak_memory())


def summarize(series: dict[str, Series], baseline: str = "plain") -> dict[str, dict]:
    """Figures per method (see README: ss-bench). Ratios are against `baseline` on the same prompts."""
    base = series.get(baseline)
    return {name: _summary(one, base) for name, one in series.items()}


def _summary(one: Series, base: Series | None) -> dict:
    runs = one.runs
    end_to_end = np.array([len(r.tokens) / r.seconds for r in runs])
    told = [r for r in runs if r.first_token is not None and len(r.tokens) > 1]
    decode_rates = np.array([(len(r.tokens) - 1) / (r.seconds - r.first_token) for r in told])
    steps = [s for r in runs for s in r.model_seconds]
    found = {
        "runs": len(runs),
        "tokens": sum(len(r.tokens) for r in runs),
        "first_token_seconds": _spread([r.first_token for r in runs if r.first_token is not None]),
        "decode_tokens_per_second": _spread(decode_rates),
        "end_to_end_tokens_per_second": _spread(end_to_end),
        "step_seconds": _spread(steps),
        "peak_bytes": one.peak_bytes,
    }
    if any(r.steps for r in runs):
        counts = AcceptanceCounts()
        for run in runs:
            for step in run.steps:
                counts.add(step.tree, step.path, len(step.tokens), len(step.verified.kept))
        summary = counts.summary()
        found["acceptance"] = {
            key: summary[key]
            for key in ("calls", "tokens_per_call", "rows_per_call", "acceptance_by_depth")
        }
    if base is not None:
        pairs = list(zip(runs, base.runs, strict=True))
        found["token_exact"] = sum(r.tokens == b.tokens for r, b in pairs)
        found["speedup_end_to_end"] = _ratio(pairs, lambda r: r.seconds / len(r.tokens))
        decoded = [(r, b) for r, b in pairs if _decoded(r) and _decoded(b)]
        found["speedup_decode"] = _ratio(
            decoded, lambda r: (r.seconds - r.first_token) / (len(r.tokens) - 1)
        )
        base_steps = [s for r in base.runs for s in r.model_seconds]
        if steps and base_steps:
            found["step_cost_ratio"] = round(float(np.median(steps) / np.median(base_steps)), 4)
    return found


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
