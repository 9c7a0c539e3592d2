"""Many cases one after the other: counts by kind, command and outcome, and one case of every defect."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz import child
from tests.fuzz.cases import Case, damage, make_case
from tests.fuzz.kept import Finished, keep_case
from tests.fuzz.outcome import judge
from tests.fuzz.sandbox import Sandbox, changes

LIMIT = 15.0  # seconds; sound commands take less than one and a half


@dataclass
class Tally:
    """counts: (kind, command, outcome) → cases; defects: signature → cases, of which the first is kept."""

    counts: Counter = field(default_factory=Counter)
    defects: dict[str, list[Finished]] = field(default_factory=dict)
    times: Counter = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def cases(self) -> int:
        return sum(self.counts.values())

    def add(self, finished: Finished) -> bool:
        """Count a case. → whether it shows a defect that no case showed before."""
        case, outcome = finished.case, finished.outcome
        self.counts[case.kind, case.command_name, outcome.name] += 1
        if not outcome.is_defect:
            return False
        self.times[outcome.signature] += 1
        found = self.defects.setdefault(outcome.signature, [])
        if len(found) < 3:
            found.append(finished)
        return len(found) == 1

    def outcomes(self) -> Counter:
        total: Counter = Counter()
        for (_, _, outcome), count in self.counts.items():
            total[outcome] += count
        return total


@contextmanager
def open_sandbox(inputs: Path) -> Iterator[Sandbox]:
    """A sandbox in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        yield Sandbox(inputs, Path(name))


def run_case(
    case: Case,
    sandbox: Sandbox,
    limit: float = LIMIT,
    keep: Path | None = None,
    harm: Callable[[Case, Sandbox], str] = damage,
) -> Finished:
    """Damage (by `harm`), run, judge, and put everything right. keep: folder for what a defect leaves."""
    try:
        sound = sandbox.snapshot()
        what = harm(case, sandbox)
        before = sandbox.snapshot()
        sandbox.watch_canaries()
        ended = child.run(case.command, sandbox, case.seconds(limit), case.unprivileged)
        changed = changes(before, sandbox.snapshot())
        damaged = bool(changes(sound, before)) and not what.startswith("nothing")
        outcome = judge(case, what, ended, changed, sandbox.read_canaries(), damaged)
        finished = Finished(case, what, ended, outcome)
        if keep is not None and finished.outcome.is_defect:
            keep_case(finished, sandbox, keep)
        return finished
    finally:
        sandbox.restore()


def run_campaign(
    inputs: Path,
    seed: int,
    cases: int | None,
    minutes: float | None,
    report: Callable[[Finished, bool, Tally], None],
    *,
    kind: str | None = None,
    command: str | None = None,
    limit: float = LIMIT,
    keep: Path | None = None,
    first: int = 0,
) -> Tally:
    """Run cases from number `first` on until so many have run or the time is over; Ctrl-C ends it early."""
    tally, started, index = Tally(), time.monotonic(), first
    with open_sandbox(inputs) as sandbox:
        try:
            while cases is None or index < first + cases:
                tally.seconds = time.monotonic() - started
                if minutes is not None and tally.seconds > 60 * minutes:
                    break
                finished = run_case(make_case(seed, index, kind, command), sandbox, limit, keep)
                report(finished, tally.add(finished), tally)
                index += 1
        except KeyboardInterrupt:
            pass
    tally.seconds = time.monotonic() - started
    return tally
