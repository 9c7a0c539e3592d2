"""On a Mac: where Core ML itself would place every operation, and how long a call takes there.

Thin over coremltools' documented `MLComputePlan` and `MLModel`. Neither runs elsewhere; tests hand in a
stand-in of the same interface.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import numpy as np

from ss_device.errors import UserError, one_line

UNITS = {"ane": "CPU_AND_NE", "gpu": "CPU_AND_GPU"}
TIMED_CALLS = 10
KINDS = {"int32": np.int32, "float16": np.float16, "float32": np.float32}


class CoreMLTools:
    """The calls that need macOS."""

    def compute_plan(self, package: Path, engine: str):
        """The compute plan of a package, which has to be compiled for it."""
        import coremltools as ct
        from coremltools.models.compute_plan import MLComputePlan
        from coremltools.models.utils import compile_model

        compiled = compile_model(str(package))
        return MLComputePlan.load_from_path(compiled, compute_units=getattr(ct.ComputeUnit, UNITS[engine]))

    def model(self, package: Path, function: str, engine: str):
        """One function, loaded for the engine."""
        import coremltools as ct

        units = getattr(ct.ComputeUnit, UNITS[engine])
        return ct.models.MLModel(str(package), function_name=function, compute_units=units)


def placement(package: Path, functions: dict, engine: str, tools=None) -> dict[str, dict]:
    """Function name → preferred devices of its operations, moved operations, and seconds of a call.

    functions: `executor.package.Function` by name, whose inputs are fed with zeros for the timing.
    Raises UserError with Core ML's message when it refuses the package.
    """
    tools = tools or CoreMLTools()
    try:
        plan = tools.compute_plan(package, engine)
        found = {}
        for name, function in functions.items():
            structure = plan.model_structure.program.functions[name]
            found[name] = _devices(plan, structure.block.operations)
            found[name]["seconds"] = _time(tools.model(package, name, engine), function)
        return found
    except UserError:
        raise
    except Exception as error:  # coremltools raises bare exceptions with Core ML's message
        raise UserError(f"{package}: Core ML refused it ({one_line(error)})") from error


def _devices(plan, operations) -> dict:
    """Counts of operations by preferred device, their shares of the estimated cost, and which moved."""
    devices, shares, moved = Counter(), Counter(), []
    for operation in operations:
        usage = plan.get_compute_device_usage_for_mlprogram_operation(operation)
        if usage is None:  # constants have no device
            continue
        device = (
            type(usage.preferred_compute_device).__name__.removeprefix("ML").removesuffix("ComputeDevice")
        )
        cost = plan.get_estimated_cost_for_mlprogram_operation(operation)
        devices[device] += 1
        shares[device] += cost.weight if cost is not None else 0.0
        if device == "CPU":
            moved.append(operation.operator_name)
    return {"devices": dict(devices), "cost_shares": dict(shares), "on_cpu": dict(Counter(moved))}


def _time(model, function) -> float:
    """Median seconds of a call on zeros, without the first calls, in which Core ML prepares itself."""
    inputs = {n: np.zeros(f.shape, KINDS[f.dtype]) for n, f in function.inputs.items()}
    state = model.make_state() if function.states else None
    seconds = []
    for _ in range(TIMED_CALLS + 2):
        started = time.perf_counter()
        model.predict(inputs, state=state) if state is not None else model.predict(inputs)
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds[2:]))
