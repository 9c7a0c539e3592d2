"""Progress of long training runs: a bar in a terminal, lines in a log, JSON where a program reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ss_device.command_line import console, print_json


@contextmanager
def training_progress(title: str, as_json: bool) -> Iterator[Callable[[dict], None]]:
    """Yield `report(record)`; records carry `step` and `steps` and whatever else is worth showing."""
    screen = console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[details]}"),
    )
    with Progress(*columns, console=screen, disable=not screen.is_terminal) as bar:
        task = bar.add_task(title, total=None, details="")

        def report(record: dict) -> None:
            details = " ".join(f"{k} {v}" for k, v in record.items() if k not in ("step", "steps", "eta"))
            bar.update(task, completed=record["step"], total=record["steps"], details=details)
            if as_json:
                print_json(record)
            elif not screen.is_terminal and record["step"] % 100 < 10:
                print(f"{title}: {record['step']}/{record['steps']} {details}", flush=True)

        yield report
