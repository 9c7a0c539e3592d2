"""Progress of long training runs: a bar in a terminal, lines in a log, JSON where a program reads."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ss_device.command_line import console, print_json


@contextmanager
def training_progress(title: str, as_json: bool) -> Iterator[Callable[[dict], None]]:
    """Yield `report(record)`; records carry `step` and `steps` and whatever else is worth showing.

    Of several processes (`accelerate launch` numbers them in RANK) only the first draws a bar.
    """
    screen = console(stderr=True)
    draws = screen.is_terminal and os.environ.get("RANK", "0") == "0"
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[details]}"),
    )
    with Progress(*columns, console=screen, disable=not draws) as bar:
        task = bar.add_task(title, total=None, details="")

        def report(record: dict) -> None:
            bar.update(task, completed=record["step"], total=record["steps"], details=_details(record))
            if as_json:
                print_json(record)
            elif not screen.is_terminal and (record["step"] % 100 < 10 or "valid" in record):
                eta = f" eta {record['eta']} s" if "eta" in record else ""
                line = f"{title}: {record['step']}/{record['steps']} {_details(record)}{eta}"
                print(line, file=sys.stderr, flush=True)

        yield report


def _details(record: dict) -> str:
    """`loss 1.2 tokens_per_second 345`; the entries of nested records stand beside the others."""
    flat: dict = {}
    for name, value in record.items():
        if name not in ("step", "steps", "eta"):
            flat |= value if isinstance(value, dict) else {name: value}
    return " ".join(f"{name} {value}" for name, value in flat.items())
