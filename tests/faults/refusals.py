"""A command whose writes are refused: a full disk from one point on, or one input/output error.

Every refusal is a run of its own: exit code 2 and one line, the earlier result as it was, nothing new
under its name; and the command run again, with space, finishes as if never disturbed.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

from tests.faults.commands import Command
from tests.faults.kills import FEW, MANY, Chosen, Failure, Outcome, points
from tests.faults.operations import NEED_SPACE, TOUCH_THE_DISK
from tests.faults.processes import Finished, TracedChild, run
from tests.faults.reference import Place, Reference, reference_of


@dataclass(frozen=True)
class Refusal:
    """full: from the point on everything that needs space fails; damaged: one operation fails."""

    name: str
    error: int
    kinds: tuple[str, ...]
    lasts: bool


REFUSALS = (
    Refusal("full", errno.ENOSPC, NEED_SPACE, True),
    Refusal("damaged", errno.EIO, TOUCH_THE_DISK, False),
)


def refuse_everywhere(
    command: Command, place: Place, refusal: Refusal, chosen: Chosen, only: str | None = None
) -> Outcome:
    """Refuse at the chosen points, one run each. only: the number of one point."""
    reference, outcome = reference_of(command, place), Outcome(f"{command.name} {refusal.name}")
    listed = [
        (number, operation.label(folder), operation)
        for number, operation, folder in points(command, place)
        if operation.kind in refusal.kinds and not (operation.repeats > FEW and operation.repeats % MANY)
    ]
    outcome.points = len(listed)
    for index, (number, label, operation) in enumerate(listed):
        if chosen(index + 1, operation) if only is None else str(number) == only:
            outcome.states += 1
            point = Failure(f"{command.name}@{number} {refusal.name}", label, "")
            _check(reference, place, refusal, number, point, outcome)
    return outcome


def _check(reference, place, refusal, number, point: Failure, outcome: Outcome) -> None:
    folder = reference.command.prepare(place.inputs, place.folder("refused"))
    finished, met = _refused_run(reference.command, place, folder, refusal, number)
    if not met:  # another order of operations: nothing was refused
        outcome.states -= 1
        return
    wrong = _ending(finished) or _standing(reference, folder, finished)
    outcome.survived += not wrong
    rerun = _rerun(reference, place, folder) if finished.status else ""
    outcome.identical += not rerun
    for what in filter(None, (wrong, rerun)):
        outcome.failures.append(Failure(point.point, point.operation, what))


def _refused_run(command, place, folder: Path, refusal: Refusal, number: int) -> tuple[Finished, bool]:
    child = TracedChild(command.body(place.inputs), folder)
    met = False
    for count, operation in enumerate(child.operations(), 1):
        due = count >= number if refusal.lasts else count == number
        if due and operation.kind in refusal.kinds and operation.kind != "read":
            operation.refuse, met = refusal.error, True
    return child.finished, met


def _ending(finished: Finished) -> str:
    """Whether the refusal was told as bad input is: one line, exit code 2."""
    errors = [line for line in finished.err.splitlines() if line.startswith("error: ")]
    if "Traceback" in finished.err:
        return f"a traceback, exit code {finished.status}: {finished.last_line}"
    if finished.status == 0:
        return ""  # what was refused did not matter: the result has to be whole then
    if finished.status != 2 or len(errors) != 1:
        return f"exit code {finished.status}: {finished.last_line or 'nothing is said'}"
    return ""


def _standing(reference: Reference, folder: Path, finished: Finished) -> str:
    standing, had_one = reference.standing(folder), bool(reference.result(reference.earlier))
    if finished.status == 0:
        return "" if standing == "new" else f"exit code 0, but the result is: {standing}"
    if standing == "neither":
        return "neither the earlier nor the new result stands there"
    return "the earlier result is gone" if standing == "nothing" and had_one else ""


def _rerun(reference: Reference, place: Place, folder: Path) -> str:
    finished = run(reference.command.body(place.inputs, rerun=True), folder)
    if finished.status:
        return f"the rerun ends with {finished.status}: {finished.last_line}"
    found = reference.after_rerun(folder)
    return f"after the rerun: {'; '.join(found[:4])}" if found else ""


