"""What the campaigns found, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict

from tests.faults.kills import Failure, Outcome
from tests.faults.races import Tally


def table(outcomes: list[Outcome]) -> str:
    """A line per command."""
    lines = ["| command | points | tried | survived | rerun identical | failures |", "|---" * 6 + "|"]
    for o in outcomes:
        cells = (o.command, o.points, o.states, o.survived, o.identical, len(o.failures))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def race_table(tallies: list[Tally]) -> str:
    """A line per race."""
    names = sorted({name for tally in tallies for name in tally.outcomes})
    lines = ["| race | rounds | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for tally in tallies:
        counts = " | ".join(str(tally.outcomes[name]) for name in names)
        lines.append(f"| {tally.race} | {tally.rounds} | {counts} |")
    return "\n".join(lines)


def failure_lines(failures: list[Failure], most: int = 400) -> str:
    """A line per kind of failure: the points to replay, the first one's operation, what went wrong."""
    kinds: dict[str, list[Failure]] = {}
    for failure in failures:
        kinds.setdefault(failure.what, []).append(failure)
    lines = []
    for what, found in kinds.items():
        points = [found[0].point, *(f.point.split("@")[-1].split("#")[-1] for f in found[1:])]
        lines.append(f"- {', '.join(points)}: before {found[0].operation}: {what[:most]}")
    return "\n".join(lines)


def as_json(found: list[Outcome] | list[Tally]) -> list[dict]:
    """The same for programs."""
    return [{**vars(entry), "failures": [asdict(f) for f in entry.failures]} for entry in found]
