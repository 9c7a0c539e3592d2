"""What `ss-validate` prints: a table per adapter, and the differences."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.table import Table

from ss_device.command_line import console
from ss_device.trace import Recorded
from ss_runtime.validation import ReplayOutcome

SHOWN_DIFFERENCES = 20
NUMBERS = ("prompts", "exact", "steps", "nodes", "max |Δ logit|", "near ties", "other", "seconds")


def print_replays(name: str, replays: list[ReplayOutcome]) -> None:
    """The table of one adapter and the differences: `near ties` that rounding explains, and `other`."""
    screen = console()
    table = Table(title=f"golden traces of '{name}'", title_justify="left", box=SIMPLE)
    for column in ("back end", "dtype"):
        table.add_column(column, no_wrap=True)
    for column in NUMBERS:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    for found in replays:
        others = len(found.differences) - found.near_ties
        table.add_row(
            found.backend,
            found.dtype,
            str(found.prompts),
            str(found.token_exact),
            str(found.steps),
            str(found.nodes),
            f"{found.max_logit_difference:.2g}",
            str(found.near_ties),
            str(others),
            f"{found.seconds:.1f}",
            "FAILED" if found.failures else "passed",
        )
    screen.print(table)
    for origin in dict.fromkeys(origin_text(f.origin) for f in replays if f.origin is not None):
        screen.print(f"traces recorded on {origin}", markup=False, soft_wrap=True)
    for found in replays:
        _print_notes(found)


def _print_notes(found: ReplayOutcome) -> None:
    for line in notes(found):
        console().print(line, markup=False, soft_wrap=True)


def notes(found: ReplayOutcome) -> list[str]:
    """Lines under the table: why a replay fails, what counts as a near tie, the differences."""
    limit, cap = found.near_tie_limit, 100 * found.tolerance.near_tie
    lines = list(found.failures)
    if found.dropped_nodes:
        lines.append(f"{found.dropped_nodes} nodes pruned that the reference kept")
    if found.broken_off:
        lines.append(f"prompts {found.broken_off} end early: the accepted path was pruned")
    if found.differences:
        lines.append(
            f"near tie: the reference's top-1/top-2 margin is at most {limit:.3g} (twice the largest "
            f"logit difference, at most {cap:g} % of the largest logit)"
        )
    for d in found.differences[:SHOWN_DIFFERENCES]:
        kind = "near tie" if found.is_near_tie(d) else "DIFFERENT"
        lines.append(
            f"{kind}: prompt {d.prompt}, step {d.step}, node {d.node}, position {d.position}: token "
            f"{d.chosen} instead of {d.expected}, margin {d.margin:.3g}"
        )
    if (more := len(found.differences) - SHOWN_DIFFERENCES) > 0:
        lines.append(f"and {more} more (--json lists all)")
    return [f"{found.backend} {found.dtype}: {line}" for line in lines]


def origin_text(origin: Recorded) -> str:
    """Device, dtype and library of a recording, in a few words."""
    return f"{origin.device}, {origin.dtype}, torch {origin.versions.get('torch', 'unknown')}"
