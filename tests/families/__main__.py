"""Measure every family on every back end in both modes and print the table: `make families`.

python -m tests.families [--markdown FILE] [family ...]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from transformers.utils import logging

from tests.families.back_ends import BACK_ENDS, make_subject, measure_back_end, mlx_back_end
from tests.families.checks import CONFIGS, TOLERANCE, Measured, measure
from tests.families.tiny import CASES

COLUMNS = ("sequence", "tree", "commits", "streams")
BEGIN, END = "<!-- table: python -m tests.families -->", "<!-- end of table -->"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.families", description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="family", help=", ".join(CASES))
    parser.add_argument("--markdown", type=Path, help="write the table between this file's markers, too")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    lines, failed = [], 0
    for name in arguments.families or CASES:
        rows, wrong = measure_family(name)
        failed += wrong
        lines += rows
        print("\n".join(rows), flush=True)
    if arguments.markdown:
        write_table(arguments.markdown, lines)
    print(f"{len(lines)} rows, {failed} with a failed check", file=sys.stderr)
    return 1 if failed else 0


def measure_family(name: str) -> tuple[list[str], int]:
    """The family's table rows, and how many of them hold a failure."""
    rows, failed = [], 0
    for mode in CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            subject = make_subject(name, mode, Path(folder) / "base")
            wrong_details = mutations(name, subject) if mode == "lossless" else "–"
            for back_end in BACK_ENDS:
                found = measure_back_end(back_end, subject, Path(folder))
                noticed = wrong_details if back_end == "mlx" else "–"
                wrong = found.failures() or "missed" in noticed
                failed += bool(wrong)
                rows.append(row(CASES[name].title, back_end, mode, found, noticed))
    return rows, failed


def mutations(name: str, subject) -> str:
    """Which wrong details of the architecture a check noticed, and which none did."""
    results = []
    for what, changes in CASES[name].mutations.items():
        found = measure(mlx_back_end(subject.changed(**changes)), subject.truth, until_failure=True)
        results.append(what if found.failures() else f"{what}: missed")
    return ", ".join(results)


def row(title: str, back_end: str, mode: str, found: Measured, noticed: str) -> str:
    """One line of the table; a failed check is in bold."""
    cells = []
    for name in COLUMNS:
        error = getattr(found, name)
        text = "–" if error is None else f"{error:.0e}"
        cells.append(f"**{text}**" if error is not None and not error <= TOLERANCE else text)
    text = "equal" if found.text else "**differs**"
    return f"| {' | '.join([title, back_end, mode, *cells, text, noticed])} |"


def write_table(path: Path, lines: list[str]) -> None:
    header = ["family", "back end", "mode", *COLUMNS, "text", "wrong details noticed"]
    table = [f"| {' | '.join(header)} |", "|---" * len(header) + "|", *lines]
    before, _, rest = path.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    path.write_text(before + BEGIN + "\n\n" + "\n".join(table) + "\n\n" + END + after)


if __name__ == "__main__":
    sys.exit(main())
