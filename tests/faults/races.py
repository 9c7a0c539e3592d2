"""Two commands at once on the same files.

What may come out is what comes out of one after the other: both orders are run undisturbed, and either
command alone for the case that the other one is refused. `interleaved` has the second command run whole
while the first stands still before one of its operations, for every one of them; `at random` starts the
second one at a random moment of the first.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.kills import Failure
from tests.faults.processes import HANGS, Child, Finished, TracedChild, run
from tests.faults.race_list import Race
from tests.faults.reference import Place
from tests.faults.snapshots import Contents, Volatile, contents, differences

WAITS = 1.0
"""Seconds that the second command gets while the first one stands still: it may wait for the first."""


SLOW, ENOUGH = 10, 12
"""How much fewer operations of a slow command are tried, and how many of a short one at the least."""


@dataclass
class Tally:
    """Rounds of one race by how they came out."""

    race: str
    rounds: int = 0
    outcomes: Counter = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, point: str, operation: str, outcome: str, what: str) -> None:
        self.rounds += 1
        self.outcomes[outcome] += 1
        if what:
            self.failures.append(Failure(point, operation, f"{outcome}: {what}"))


@dataclass
class Judge:
    """What may come out: after both in either order, after each alone, before any."""

    race: Race
    both: list[Contents]
    alone: list[Contents]
    before: Contents
    volatile: Volatile

    def outcome(self, folder: Path, ends: list[Finished]) -> tuple[str, str]:
        """How a round came out, and what is wrong with that (empty: nothing)."""
        for finished in ends:
            if finished.status == HANGS:
                return "hang", finished.last_line
            if "Traceback" in finished.err or finished.status not in (0, 2):
                return "traceback", finished.last_line
        good = [finished.status == 0 for finished in ends]
        found = self.race.view(contents(folder))
        if all(good):
            allowed, name = self.both, "both ok"
        elif any(good):
            allowed, name = [self.alone[good.index(True)]], "one refused"
        else:
            allowed, name = [self.before], "both refused"
        wrong = [differences(wanted, found, self.volatile) for wanted in allowed]
        if [] in wrong:
            return name, ""
        shown = "; ".join(min(wrong, key=len)[:4])
        lost = self.race.result not in found and not any(n.startswith(self.race.result) for n in found)
        said = [finished.last_line for finished in ends if finished.status]
        return "lost result" if lost else "wrong result", f"({name}) {shown} {' '.join(said)}".strip()


def judge_of(race: Race, place: Place) -> Judge:
    """Run the commands one after the other, in both orders, and each alone."""
    bodies, volatile = race.bodies(place.inputs), Volatile()

    def after(*order: int) -> Contents:
        folder = race.prepare(place.inputs, place.folder("reference"))
        for index in order:
            run(bodies[index], folder)
        return race.view(contents(folder))

    both = [after(0, 1), after(1, 0)]
    volatile.learn(both[0], after(0, 1))
    return Judge(race, both, [after(0), after(1)], after(), volatile)


def interleaved(race: Race, place: Place, stride: int = 1, only: int | None = None) -> Tally:
    """The second command whole before every `stride`-th operation of the first."""
    judge, tally = judge_of(race, place), Tally(f"{race.name}")
    labels = [label for label, _ in _stopping(race, place, 0)]
    stride = stride * SLOW if race.slow else max(1, min(stride, len(labels) // ENOUGH))
    for number, label in enumerate(labels, 1):
        moved = label.startswith("rename") and "/" not in label and not race.slow
        if number == only or (only is None and (number % stride == 0 or moved)):
            for _, ends in _stopping(race, place, number):
                if ends:
                    tally.add(f"{race.name}@{number}", label, *judge.outcome(place.folder("race"), ends))
    return tally


def _stopping(race: Race, place: Place, number: int) -> Iterator[tuple[str, list[Finished] | None]]:
    """The first command's operations by label; the second one runs before operation `number`."""
    first, second = race.bodies(place.inputs)
    folder = race.prepare(place.inputs, place.folder("race"))
    traced, other = TracedChild(first, folder, reads=race.reads), None
    for count, operation in enumerate(traced.operations(), 1):
        yield operation.label(folder), None
        if count == number:
            other = Child(second, folder)
            other.wait_at_most(WAITS)
    yield "end", [traced.finished, other.wait()] if other else None


def at_random(race: Race, place: Place, rounds: int, seed: int, only: int | None = None) -> Tally:
    """Both commands at once, one of them starting later by a random share of what it takes."""
    judge, tally = judge_of(race, place), Tally(race.name)
    bodies = race.bodies(place.inputs)
    folder = race.prepare(place.inputs, place.folder("race"))
    started = time.monotonic()
    run(bodies[0], folder)
    takes = time.monotonic() - started
    for number in range(rounds) if only is None else [only]:
        chance = random.Random(f"{seed}:{race.name}:{number}")
        folder = race.prepare(place.inputs, place.folder("race"))
        early, late = chance.sample([0, 1], 2)
        delay = chance.uniform(0, 0.9 * takes) * chance.choice((0, 1, 1, 1))
        children: dict[int, Child] = {early: Child(bodies[early], folder)}
        time.sleep(delay)
        children[late] = Child(bodies[late], folder)
        ends = [children[index].wait() for index in (0, 1)]
        label = f"{'second' if late else 'first'} command {delay * 1000:.0f} ms later"
        tally.add(f"{race.name}#{seed}:{number}", label, *judge.outcome(folder, ends))
    return tally

