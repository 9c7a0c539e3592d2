"""Results of `ss-bench`: JSON, Markdown tables, plots, and the comparison of two files."""

from __future__ import annotations

from pathlib import Path

from ss_device.errors import UserError
from ss_device.files import read_json

FORMAT_VERSION = 1
COLUMNS = (
    "method", "decode tok/s", "p10–p90", "speed-up", "end to end", "τ", "step cost", "first token ms",
    "peak MB", "token-exact",
)  # fmt: skip


def markdown(result: dict) -> str:
    """The table of one result."""
    bits = f", keys and values in {result['kv_bits']} bits" if result.get("kv_bits") else ""
    lines = [
        f"{result['prompts']} prompts, {result['dtype']}{bits}, {result['device']}",
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
        _number(found.get("acceptance"), "tokens_per_call", 2),
        _number(found, "step_cost_ratio", 2),
        f"{1000 * first['median']:.0f}" if first else "–",
        f"{found['peak_bytes'] / 1e6:.0f}" if found["peak_bytes"] else "–",
        f"{found['token_exact']}/{found['runs']}" if "token_exact" in found else "–",
    ]
    return cells


def _number(found: dict | None, key: str, digits: int) -> str:
    return f"{found[key]:.{digits}f}" if found and found.get(key) is not None else "–"


def read_result(path: Path) -> dict:
    """A result file of `ss-bench run`. Raises UserError for anything else."""
    raw = read_json(path)
    if raw.get("format_version") != FORMAT_VERSION or "methods" not in raw:
        raise UserError(f"{path}: not a result of ss-bench run (format version {FORMAT_VERSION})")
    return raw


def compare(before: dict, after: dict) -> str:
    """A Markdown table of two results' shared methods: rates, and after / before."""
    shared = [name for name in before["methods"] if name in after["methods"]]
    if not shared:
        raise UserError("the two results have no method in common")
    lines = ["| method | decode tok/s A | B | B / A | τ A | τ B |", "|---" * 6 + "|"]
    for name in shared:
        a, b = before["methods"][name], after["methods"][name]
        rates = [r["decode_tokens_per_second"] or r["end_to_end_tokens_per_second"] for r in (a, b)]
        ratio = rates[1]["median"] / rates[0]["median"]
        taus = [_number(r.get("acceptance"), "tokens_per_call", 2) for r in (a, b)]
        cells = [name, *(f"{r['median']:.1f}" for r in rates), f"{ratio:.3f}", *taus]
        lines.append("| " + " | ".join(cells) + " |")
    for key in ("device", "dtype", "kv_bits", "adapter", "prompts"):
        if before.get(key) != after.get(key):
            lines += ["", f"{key} differs: {before.get(key)} / {after.get(key)}"]
    return "\n".join(lines) + "\n"


def plot(result: dict, path: Path) -> None:
    """Speed-up per method and acceptance per depth as PNG. Raises UserError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UserError("--plot needs matplotlib: pip install matplotlib") from error
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    speed = {
        n: f["speedup_end_to_end"] for n, f in result["methods"].items() if f.get("speedup_end_to_end")
    }
    spread = [
        [s["median"] - s["p10"] for s in speed.values()],
        [s["p90"] - s["median"] for s in speed.values()],
    ]
    left.barh(list(speed), [s["median"] for s in speed.values()], xerr=spread, capsize=3)
    left.axvline(1.0, color="black", linewidth=0.8)
    left.set_xlabel("end-to-end speed-up over plain (median, p10–p90)")
    left.invert_yaxis()
    for name, found in result["methods"].items():
        if depths := found.get("acceptance", {}).get("acceptance_by_depth"):
            right.plot(range(1, len(depths) + 1), depths, marker="o", label=name)
    right.set(xlabel="depth", ylabel="acceptance, given the parent's", ylim=(0, 1))
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
