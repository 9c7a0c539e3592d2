"""What a campaign found, as tables and as JSON."""

from __future__ import annotations

from collections import Counter

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from tests.fuzz.campaign import Tally
from tests.fuzz.kept import Finished
from tests.fuzz.outcome import DEFECTS, HARMLESS, MEANING


def print_tally(tally: Tally, screen: Console) -> None:
    """Outcomes by kind of file, then every distinct defect, most frequent first."""
    found = tally.outcomes()
    columns = [name for name in (*HARMLESS, *DEFECTS) if found[name]]
    table = Table(title=f"{tally.cases} cases in {tally.seconds:.0f} s", title_justify="left", box=SIMPLE)
    table.add_column("kind")
    for name in columns:
        table.add_column(name, justify="right")
    by_kind: dict[str, Counter] = {}
    for (kind, _, outcome), count in tally.counts.items():
        by_kind.setdefault(kind, Counter())[outcome] += count
    for kind in sorted(by_kind):
        table.add_row(kind, *(str(by_kind[kind][name] or "") for name in columns))
    table.add_section()
    table.add_row("all", *(str(found[name]) for name in columns))
    screen.print(table)
    for name in columns:
        if name in DEFECTS:
            screen.print(f"{name}: {MEANING[name]}", markup=False)
    for line in defect_lines(tally):
        screen.print(line, markup=False, soft_wrap=True)


def defect_lines(tally: Tally) -> list[str]:
    """One line per distinct defect: how often, what, a case that shows it."""
    lines = []
    for signature, count in tally.times.most_common():
        shown = tally.defects[signature][0]
        lines.append(
            f"{count:5} × {signature}  [{shown.case.id}; {shown.case.kind}, {shown.case.command_name}; "
            f"{shown.what[:100]}] {printable(shown.outcome.said)[:160]}"
        )
    return lines


def to_dict(tally: Tally, seed: int) -> dict:
    """The same as JSON."""
    return {
        "seed": seed,
        "cases": tally.cases,
        "seconds": round(tally.seconds, 1),
        "outcomes": dict(tally.outcomes()),
        "counts": [
            {"kind": kind, "command": command, "outcome": outcome, "cases": count}
            for (kind, command, outcome), count in sorted(tally.counts.items())
        ],
        "defects": [
            {
                "signature": signature,
                "cases": count,
                "examples": [f.to_dict() for f in tally.defects[signature]],
            }
            for signature, count in tally.times.most_common()
        ],
    }


def print_case(finished: Finished, screen: Console) -> None:
    """One case with everything that its command said."""
    facts = finished.to_dict() | {"meaning": MEANING[finished.outcome.name]}
    for name, value in facts.items():
        screen.print(f"{name:8} {printable(str(value))}", markup=False, soft_wrap=True)
    for name in ("stdout", "stderr"):
        text = getattr(finished.ended, name)[-6000:].decode("utf-8", "replace")
        screen.print(f"--- {name}\n{printable(text)}", markup=False, soft_wrap=True)


def printable(text: str) -> str:
    """The text with control characters spelt out."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)
