"""Plots of `ss-bench`: one result, and several applications side by side with a device's step times."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ss_device.errors import UserError
from ss_runtime.bench.cost_table import CostTable


def check_plot_file(path: Path) -> None:
    """Raise UserError unless a plot can get this name: matplotlib is there and writes such files."""
    formats = _pyplot().gcf().canvas.get_supported_filetypes()
    _pyplot().close("all")
    if path.suffix.removeprefix(".").lower() not in formats:
        raise UserError(f"{path}: not a supported picture format (known: {', '.join(formats)})")


def plot_result(result: dict, path: Path) -> None:
    """Speed-up per method and acceptance per depth of one result."""
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=(11, 4))
    speed = _speedups(result)
    middles, errors = _medians(speed.values())
    left.barh(list(speed), middles, xerr=errors, capsize=3)
    left.axvline(1.0, color="black", linewidth=0.8)
    left.set_xlabel("end-to-end speed-up over plain (median, p10–p90)")
    left.invert_yaxis()
    for name, found in result["methods"].items():
        if depths := (found.get("acceptance") or {}).get("acceptance_by_depth"):
            right.plot(range(1, len(depths) + 1), depths, marker="o", label=name)
    right.set(xlabel="depth", ylabel="acceptance, given the parent's", ylim=(0, 1))
    if right.lines:
        right.legend()
    _save(figure, path)


def plot_applications(results: dict[str, dict], costs: dict[str, CostTable], path: Path) -> None:
    """Speed-up of every method per application, and seconds of a step against its nodes.

    results: label → result of `ss-bench run`; costs: label → step times
    (without any, the second picture is left out).
    """
    figure, axes = _pyplot().subplots(1, 1 + bool(costs), figsize=(8 + 5 * bool(costs), 4.2), squeeze=False)
    bars = axes[0][0]
    names = list(dict.fromkeys(n for result in results.values() for n in _speedups(result)))
    if not names:
        raise UserError("no result has a speed-up: plain decoding must be among the methods")
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        at = [i for i, result in enumerate(results.values()) if name in _speedups(result)]
        middles, errors = _medians([_speedups(list(results.values())[i])[name] for i in at])
        where = np.array(at) + (place - (len(names) - 1) / 2) * width
        bars.bar(where, middles, width, yerr=errors, capsize=2, label=name)
    bars.axhline(1.0, color="black", linewidth=0.8)
    bars.set_xticks(range(len(results)), list(results))
    bars.set_ylabel("end-to-end speed-up over plain (median, p10–p90)")
    bars.legend(fontsize="small")
    for label, found in costs.items():
        _draw_costs(axes[0][1], label, found)
    _save(figure, path)


def _draw_costs(axes, label: str, found: CostTable) -> None:
    """One adapter's step times, in ms."""
    line = axes.plot(found.sizes, 1000 * np.array(found.seconds), marker="o", label=label)[0]
    if found.streams:
        axes.axhline(1000 * found.streams, linestyle=":", color=line.get_color())
    for pruned in found.pruned:
        axes.plot(pruned.nodes, 1000 * pruned.step_seconds, "x", color=line.get_color())
    axes.set(xlabel="nodes N (dotted: the streams' own pass; ×: pruned)", ylabel="ms per step")
    axes.set_ylim(0)
    axes.legend(fontsize="small")


def _speedups(result: dict) -> dict[str, dict]:
    return {n: s for n, f in result["methods"].items() if (s := f.get("speedup_end_to_end"))}


def _medians(spreads) -> tuple[list[float], list[list[float]]]:
    """Medians, and their distances to the 10th and 90th percentile [2, n]."""
    spreads = list(spreads)
    below = [s["median"] - s["p10"] for s in spreads]
    return [s["median"] for s in spreads], [below, [s["p90"] - s["median"] for s in spreads]]


def _pyplot():
    """matplotlib without a screen."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UserError("plots need matplotlib: pip install matplotlib") from error
    return plt


def _save(figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    _pyplot().close(figure)
