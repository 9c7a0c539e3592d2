"""A command killed before every change to files, and in the middle of every write.

The child stands still before a change; a copy of its folder is what a kill there leaves. On such copies
its result is opened and the command is run again. Copies that are the same are looked at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.commands import Command
from tests.faults.operations import WRITES, Operation
from tests.faults.processes import HANGS, TracedChild, run
from tests.faults.reference import Place, Reference, reference_of
from tests.faults.snapshots import copy_of, digest

HALF_FROM = 2
"""Bytes of the shortest write that is cut in half."""

FEW, MANY = 20, 1024
"""Writes to one file in a row that are told apart, and how far apart those are that are chosen behind."""


@dataclass(frozen=True)
class Failure:
    """What went wrong. point: `command@number`, with `h` for half a write; --point takes the number."""

    point: str
    operation: str
    what: str


@dataclass
class Outcome:
    """Counts of one command. points: changes to files; states: different folders a kill can leave."""

    command: str
    points: int = 0
    states: int = 0
    survived: int = 0
    identical: int = 0
    failures: list[Failure] = field(default_factory=list)
    volatile: list[str] = field(default_factory=list)


Chosen = Callable[[int, Operation], bool]


def every(stride: int) -> Chosen:
    """Everything that gives a result its name, and of the other operations those at a fixed stride.

    Some writers write a file in thousands of pieces, of which few are chosen.
    """

    def chosen(number: int, operation: Operation) -> bool:
        if operation.repeats > FEW and operation.repeats % MANY:
            return False
        return number % stride == 0 or _names_a_result(operation)

    return chosen


def _names_a_result(operation: Operation) -> bool:
    """A renaming that does not stay within a temporary folder."""
    partial = [any(".partial" in name for name in path.parent.parts) for path in operation.paths]
    return operation.kind.startswith("rename") and not all(partial)


def points(command: Command, place: Place) -> Iterator[tuple[int, Operation, Path]]:
    """Run the command; at each of its changes: number, change, folder as it is before it."""
    folder = command.prepare(place.inputs, place.folder("run"))
    child = TracedChild(command.body(place.inputs), folder)
    for number, operation in enumerate(child.operations(), 1):
        yield number, operation, folder
    if child.finished.status:
        raise RuntimeError(f"{command.name}: failed while it was watched: {child.finished.err}")


def kill_everywhere(
    command: Command, place: Place, chosen: Chosen, only: str | None = None
) -> Outcome:
    """Check what a kill leaves at the chosen points. only: one point, `12` or `12h`."""
    reference, outcome, seen = reference_of(command, place), Outcome(command.name), set()
    volatile = reference.volatile
    outcome.volatile = sorted(volatile.files | {n for n, keys in volatile.values.items() if keys})
    for number, operation, folder in points(command, place):
        outcome.points += 1
        for half in (False, True) if operation.kind in WRITES else (False,):
            name = f"{number}{'h' if half else ''}"
            if not (chosen(number, operation) if only is None else name == only):
                continue
            if half and len(operation.data) < HALF_FROM:
                continue
            state = copy_of(folder, place.folder("state"), operation if half else None)
            if (key := digest(state)) in seen and only is None:
                continue
            seen.add(key)
            point = Failure(f"{command.name}@{name}", operation.label(folder), "")
            _check(reference, place, state, point, outcome)
    return outcome


def _check(reference: Reference, place: Place, state: Path, point: Failure, outcome: Outcome) -> None:
    """Open the result and run the command again, each on a copy of the state."""
    outcome.states += 1
    lost, wrong = _damage(reference, place, state), _rerun(reference, place, state)
    outcome.survived += not lost
    outcome.identical += not wrong
    for what in filter(None, (lost, wrong)):
        outcome.failures.append(Failure(point.point, point.operation, what))


def _damage(reference: Reference, place: Place, state: Path) -> str:
    """What is wrong with the result as it stands; empty where it is the earlier or the new one."""
    command = reference.command
    folder = copy_of(state, place.folder("opened"))
    opened = run(lambda: command.read(folder / command.result), folder)
    standing = reference.standing(folder)
    had_one = bool(reference.result(reference.earlier))
    if standing == "nothing":
        return "the earlier result is gone" if had_one else ""
    if standing == "neither":
        return f"neither the earlier nor the new result stands there ({opened.last_line or 'readable'})"
    if standing in ("earlier", "new") and opened.status:
        return f"the {standing} result cannot be read: {opened.last_line}"
    return ""


def _rerun(reference: Reference, place: Place, state: Path) -> str:
    """What is wrong after the command was run again; empty where all is as if never disturbed."""
    command = reference.command
    folder = copy_of(state, place.folder("again"))
    if not reference.after_rerun(folder):
        return ""  # all that was left to do was to end
    finished = run(command.body(place.inputs, rerun=True), folder)
    if finished.status == HANGS:
        return "the rerun hangs"
    if finished.status:
        return f"the rerun ends with {finished.status}: {finished.last_line}"
    if found := reference.after_rerun(folder):
        return f"after the rerun: {'; '.join(found[:4])}"
    opened = run(lambda: command.read(folder / command.result), folder)
    return f"the rerun's result cannot be read: {opened.last_line}" if opened.status else ""

