"""How long a base run goes on: a number of steps or of minutes, and the learning rate over it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ss_device.command_line import positive, positive_number
from ss_device.errors import UserError
from ss_device.settings import setting
from ss_device.training.recipe import Schedule

HOW_LONG = "how long: a stretch ends with the rate decayed to zero"
MOST_STEPS, MOST_MINUTES = 10**9, 10**7
"""Years: what a mistyped or damaged number must not make of a run."""


@dataclass(frozen=True)
class Budget:
    """One stretch of a run, bounded by `steps` or, where that is 0, by `minutes` of training.

    hold: the rate does not decay in this stretch; the model is not written, and a later stretch goes on.
    """

    steps: int = setting(0, help="optimizer steps (default: the recipe's)", parse=positive, group=HOW_LONG)
    minutes: float = setting(
        0.0, help="time budget instead, without measurements", parse=positive_number, group=HOW_LONG
    )
    hold: bool = setting(
        False, help="do not decay and write no model: a later stretch continues", group=HOW_LONG
    )

    def __post_init__(self) -> None:
        if not (0 <= self.steps <= MOST_STEPS and 0 <= self.minutes <= MOST_MINUTES):
            raise UserError(
                f"a stretch of {self.steps} steps or {self.minutes} minutes (at most {MOST_STEPS} steps, "
                f"{MOST_MINUTES} minutes)"
            )

    def __str__(self) -> str:
        return (f"{self.steps} steps" if self.steps else f"{self.minutes:g} minutes") + " held" * self.hold

    def done(self, steps: int, seconds: float) -> float:
        """The share of the stretch that lies behind, 0 to 1, after so many steps and seconds of it."""
        share = steps / self.steps if self.steps else seconds / (60 * self.minutes)
        return min(1.0, share)

    def decaying(self, done: float, schedule: Schedule) -> bool:
        """Whether the rate falls at this share of the stretch."""
        return not self.hold and done >= 1 - schedule.decay_share


def learning_rate(step: int, done: float, budget: Budget, schedule: Schedule) -> float:
    """The rate of step `step` (counted over all stretches) at the share `done` of the present stretch."""
    rate = schedule.learning_rate * min(1.0, (step + 1) / max(1, schedule.warmup_steps))
    if budget.decaying(done, schedule):
        rate *= (1 - done) / schedule.decay_share
    return rate


class StepClock:
    """Seconds of training: steps alone, without what lies between them or a process that was stopped.

    A step counts at most five times the mean of those before, so a machine that slept, or a run that
    was paused (SIGSTOP), does not use up its budget of minutes.
    """

    LONGEST = 5.0
    SETTLED = 20

    def __init__(self) -> None:
        self.steps, self.seconds = 0, 0.0
        self.start()

    def start(self) -> None:
        """A step begins."""
        self.began = time.monotonic()

    def step(self) -> float:
        """Seconds that the step which ends now counts."""
        spent = time.monotonic() - self.began
        if self.steps >= self.SETTLED:
            spent = min(spent, self.LONGEST * self.seconds / self.steps)
        self.steps, self.seconds = self.steps + 1, self.seconds + spent
        return spent
