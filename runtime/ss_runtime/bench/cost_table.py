"""The tables of step times in a `tuning.json`, read for plots."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ss_device.draft_policy import StepCosts
from ss_device.errors import UserError
from ss_device.strict_json import read_json, typed


@dataclass(frozen=True)
class PrunedStep:
    """Median seconds of a step of `nodes` nodes of which pruning keeps `kept`, and of all of them."""

    nodes: int
    kept: int
    step_seconds: float
    unpruned_step_seconds: float


@dataclass(frozen=True)
class CostTable:
    """Seconds of a step per tree size, as `StepCosts`; context: tokens that stood before the tree."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    streams: float
    context: int = 0
    pruned: tuple[PrunedStep, ...] = ()

    def __post_init__(self) -> None:
        StepCosts(self.sizes, self.seconds, self.streams)


def tuning_costs(path: Path) -> dict[str, CostTable]:
    """`application:dtype` → table of costs in a `tuning.json`, the device's name before it where the
    file has several. Raises UserError for a file without one."""
    found = {}
    devices = read_json(path).get("devices")
    try:
        for device, entries in devices.items():
            for name, entry in entries.items():
                evidence = entry["evidence"]
                if isinstance(evidence, dict):  # a list: written before the table was
                    table = typed(CostTable, evidence["costs"], name)
                    found[f"{device}: {name}" if len(devices) > 1 else name] = table
    except (AttributeError, KeyError, TypeError, UserError) as error:
        raise UserError(f"{path}: missing or wrong entry ({error}); run ss-bench tune again") from error
    if not found:
        raise UserError(f"{path}: no table of costs; run ss-bench tune again")
    return found
