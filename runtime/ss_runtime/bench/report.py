"""Results of `ss-bench`: JSON, Markdown tables, and the comparison of two files."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ss_device.errors import UserError, printable
from ss_device.json_numbers import with_nulls
from ss_device.outputs import WAIT_SECONDS, output_lock, write_text
from ss_device.strict_json import check_numbers, read_json

# 1: `runs` was a count, and no totals; what compare and plot read is the same.
FORMAT_VERSION, READABLE = 2, (1, 2)
COLUMNS = (
    "method", "decode tok/s", "p10–p90", "speed-up", "end to end", "all prompts", "τ", "step cost",
    "host ms per call", "first token ms", "peak MB", "token-exact",
)  # fmt: skip
MOST = 1e12
RATES = ("decode_tokens_per_second", "end_to_end_tokens_per_second")


def write_result(result: dict, path: Path) -> None:
    """JSON with a line per run, and the Markdown beside it. A figure that is not finite is null."""
    text = json.dumps(with_nulls(result), indent=1)
    flat = re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), text)
    with output_lock(path, WAIT_SECONDS):  # both files are of one result
        write_text(path.with_suffix(".md"), markdown(result))
        write_text(path, flat.replace("[ ", "[").replace(" ]", "]") + "\n")


def markdown(result: dict) -> str:
    """The table of one result."""
    bits = f", keys and values in {result['kv_bits']} bits" if result.get("kv_bits") else ""
    lines = [
        f"{result['prompts']} prompts, {result['backend']} in {result['dtype']}{bits}, {result['device']}, "
        f"BLAS threads: {result['blas_threads'] or 'not known'}",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---" * len(COLUMNS) + "|",
    ]
    for name, found in result["methods"].items():
        lines.append("| " + " | ".join(_cells(name, found)) + " |")
    by_depth = [
        f"{name}: " + " ".join(f"{a:.2f}" for a in found["acceptance"]["acceptance_by_depth"][:10])
        for name, found in result["methods"].items()
        if found.get("acceptance", {}).get("acceptance_by_depth")
    ]
    if by_depth:
        lines += ["", "acceptance per depth, given the parent's:", "", *(f"* {line}" for line in by_depth)]
    return "\n".join(lines) + "\n"


def _cells(name: str, found: dict) -> list[str]:
    rate, first = found["decode_tokens_per_second"], found["first_token_seconds"]
    cells = [
        name,
        _number(rate, "median", 1),
        f"{rate['p10']:.1f}–{rate['p90']:.1f}" if rate else "–",
        _number(found.get("speedup_decode"), "median", 2),
        _number(found.get("speedup_end_to_end"), "median", 2),
        _number(found, "total_speedup_end_to_end", 2),
        _number(found.get("acceptance"), "tokens_per_call", 2),
        _number(found, "mean_step_cost_ratio", 2),
        f"{1000 * host:.2f}" if (host := found["totals"]["host_seconds_per_call"]) is not None else "–",
        f"{1000 * first['median']:.0f}" if first else "–",
        f"{found['peak_bytes'] / 1e6:.0f}" if found["peak_bytes"] is not None else "not measured",
        f"{found['token_exact']}/{len(found['runs'])}" if "token_exact" in found else "–",
    ]
    return cells


def _number(found: dict | None, key: str, digits: int) -> str:
    return f"{found[key]:.{digits}f}" if found and found.get(key) is not None else "–"


def tuning_markdown(evidence: dict) -> str:
    """The candidates of `ss-bench tune`, best first, and seconds by nodes."""
    lines = ["| draft | tokens per call | call ms | drafting ms | predicted tok/s |", "|---" * 5 + "|"]
    for found in sorted(evidence["candidates"], key=lambda e: -e["tokens_per_second"]):
        times = f"{1000 * found['step_seconds']:.2f} | {1000 * found['draft_seconds']:.2f}"
        most = "at most " if found.get("bound") else ""
        tokens, rate = found["tokens_per_call"], found["tokens_per_second"]
        lines.append(f"| {found['draft']} | {most}{tokens:.2f} | {times} | {most}{rate:.1f} |")
    costs = evidence["costs"]
    times = [f"{n}: {1000 * s:.2f}" for n, s in zip(costs["sizes"], costs["seconds"], strict=True)]
    lines += ["", f"tokens per call: {evidence['source']}"]
    lines += ["", f"ms by nodes: {', '.join(times)}; the streams' own pass {1000 * costs['streams']:.2f}"]
    for found in costs["pruned"]:
        here, whole = (1000 * found[name] for name in ("step_seconds", "unpruned_step_seconds"))
        lines += ["", f"{found['nodes']} nodes, {found['kept']} kept: {here:.2f} instead of {whole:.2f} ms"]
    return "\n".join(lines) + "\n"


def read_result(path: Path) -> dict:
    """A result file of `ss-bench run`, checked as far as `compare` and plots read it. Raises UserError."""
    raw = _printable(read_json(path))
    check_numbers(raw, str(path))
    if raw.get("format_version") not in READABLE or not isinstance(raw.get("methods"), dict):
        raise UserError(f"{path}: not a result of ss-bench run (format version {FORMAT_VERSION})")
    raw.setdefault("backend", "mlx")  # there was no other
    for name, found in raw["methods"].items():
        if not (isinstance(found, dict) and _is_method(found)):
            raise UserError(f"{path}: the figures of method '{name}' are missing or wrong")
    return raw


def _printable(value):
    """A JSON value with escapes for what its texts would do to a terminal."""
    if isinstance(value, dict):
        return {printable(name): _printable(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_printable(entry) for entry in value]
    return printable(value) if isinstance(value, str) else value


def _is_method(found: dict) -> bool:
    """Whether these are figures of one method."""
    spreads = [found.get(key, 0) for key in RATES]  # both are there, null where a method does not tell
    speedup = found.get("speedup_end_to_end")
    acceptance = found.get("acceptance") or {"acceptance_by_depth": []}
    depths = acceptance.get("acceptance_by_depth") if isinstance(acceptance, dict) else None
    return (
        all(each is None or _is_spread(each) for each in (*spreads, speedup))
        and isinstance(depths, list)
        and all(_is_number(x) for x in (*depths, acceptance.get("tokens_per_call", 1.0)))
    )


def _is_spread(value: object) -> bool:
    """Whether this is a median with the percentiles around it."""
    numbers = [value.get(name) for name in ("p10", "median", "p90")] if isinstance(value, dict) else []
    return bool(numbers) and all(map(_is_number, numbers)) and numbers == sorted(numbers)


def _is_number(value: object) -> bool:
    """Whether this may be a rate, a ratio or a share; a plot's axes end before floating point does."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MOST


def compare(before: dict, after: dict) -> dict:
    """Two results' shared methods: `methods` by name with the rate that both have (decoding, else end to
    end; None without one), `before`, `after` in tokens/s, `ratio`, tokens per call; `differences` of their
    settings. Raises UserError without a shared method."""
    shared = [name for name in before["methods"] if name in after["methods"]]
    if not shared:
        raise UserError("the two results have no method in common")
    keys = ("device", "backend", "dtype", "adapter", "prompts", "max_tokens", "blas_threads")
    differences = {k: [before.get(k), after.get(k)] for k in keys if before.get(k) != after.get(k)}
    methods = {n: _compared(before["methods"][n], after["methods"][n]) for n in shared}
    return {"methods": methods, "differences": differences}


def _compared(a: dict, b: dict) -> dict:
    rate = next((key for key in RATES if a[key] and b[key]), None)
    rates = [found[rate]["median"] if rate else None for found in (a, b)]
    return {
        "rate": rate,
        "before": rates[0],
        "after": rates[1],
        "ratio": round(rates[1] / rates[0], 4) if rates[0] and rates[1] is not None else None,
        "tokens_per_call": [(r.get("acceptance") or {}).get("tokens_per_call") for r in (a, b)],
    }


def comparison_markdown(compared: dict) -> str:
    """A Markdown table of `compare`."""
    lines = ["| method | rate | A tok/s | B tok/s | B / A | τ A | τ B |", "|---" * 7 + "|"]
    for name, found in compared["methods"].items():
        rate = (found["rate"] or "–").removesuffix("_tokens_per_second").replace("_", " ")
        digits = {"before": 1, "after": 1, "ratio": 3}
        numbers = [_number(found, key, count) for key, count in digits.items()]
        taus = ["–" if tau is None else f"{tau:.2f}" for tau in found["tokens_per_call"]]
        lines.append("| " + " | ".join([name, rate, *numbers, *taus]) + " |")
    for key, (a, b) in compared["differences"].items():
        lines += ["", f"{key} differs: {a} / {b}"]
    return "\n".join(lines) + "\n"
