"""A Core ML package's functions as engines: Core ML itself on a Mac, the reference executor anywhere."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ss_device.bundle import Bundle, BundledAdapter, StepFunctions
from ss_device.errors import UserError, library_errors, one_line
from ss_runtime.function_step_model import Engine, FunctionStepModel, chained, open_step_model

# Engines that Core ML may use, as coremltools calls them.
COMPUTE_UNITS = {"all": "ALL", "ane": "CPU_AND_NE", "gpu": "CPU_AND_GPU", "cpu": "CPU_ONLY"}
REFUSED = "not be able to run predict"


def open_executor_model(
    bundle: Bundle, adapter: BundledAdapter, dtype: str = "float16", keep_weights: bool = True
) -> FunctionStepModel:
    """The adapter's package on the reference executor (any system, slow).

    dtype: `float16` rounds as the package stores, `float32` shows the graph without rounding.
    keep_weights: False decodes large weights anew for every call, for models that memory holds once.
    """
    from ss_executor import load_package

    functions = _functions(bundle, adapter)
    packages = [load_package(bundle.path / name) for name in functions.packages]

    def engine(part: int, name: str) -> Engine:
        program = packages[part].program(name, dtype, keep_weights)
        return _ExecutorEngine(program, bundle.path / functions.packages[part])

    return open_step_model(bundle, adapter, functions, chained(functions, engine))


def open_coreml_model(
    bundle: Bundle, adapter: BundledAdapter, compute_units: str = "all"
) -> FunctionStepModel:
    """The adapter's package on Core ML. compute_units: which engines it may use (`COMPUTE_UNITS`).

    Raises UserError off macOS or when Core ML refuses the package.
    """
    functions = _functions(bundle, adapter)
    if sys.platform != "darwin":
        raise UserError(
            f"Core ML needs macOS 15 or later, this is {sys.platform}; the reference executor runs "
            f"the same package here"
        )
    paths = [bundle.path / name for name in functions.packages]
    engines = chained(functions, lambda part, name: _CoreMLEngine(paths[part], name, compute_units))
    return open_step_model(bundle, adapter, functions, engines)


class _ExecutorEngine:
    """A program of the executor; what it cannot compute in a damaged package is a UserError."""

    def __init__(self, program: Engine, path: Path) -> None:
        self._program, self._path = program, path
        self.make_state = program.make_state

    def predict(self, inputs: Mapping[str, np.ndarray], state) -> Mapping[str, np.ndarray]:
        with library_errors(f"{self._path}: the executor cannot run it"):
            return self._program.predict(inputs, state)


class _CoreMLEngine:
    """A function of a package on Core ML, through coremltools."""

    def __init__(self, path: Path, function: str, compute_units: str) -> None:
        try:
            from coremltools import ComputeUnit
            from coremltools.models import MLModel
        except ImportError as error:
            raise UserError("Core ML needs coremltools: pip install coremltools") from error
        self._path, self._function = path, function
        units = ComputeUnit[COMPUTE_UNITS[compute_units]]
        with self._one_line("load"), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self._model = MLModel(str(path), function_name=function, compute_units=units)
        # A model that Core ML refuses is made all the same, with a warning that it cannot predict.
        if refusals := [w.message for w in said if REFUSED in str(w.message)]:
            raise UserError(f"{path}: Core ML cannot load '{function}': {one_line(refusals[0])}")

    def make_state(self):
        with self._one_line("make a state for"):
            return self._model.make_state()

    def predict(self, inputs, state):
        with self._one_line("run"):
            return self._model.predict(dict(inputs), state=state)

    @contextmanager
    def _one_line(self, action: str) -> Iterator[None]:
        """coremltools raises bare exceptions with Core ML's message."""
        try:
            yield
        except Exception as error:
            what = f"{self._path}: Core ML cannot {action} '{self._function}'"
            raise UserError(f"{what}: {one_line(error)}") from error


def _functions(bundle: Bundle, adapter: BundledAdapter) -> StepFunctions:
    if adapter.coreml is None:
        raise UserError(f"{bundle.path}: adapter '{adapter.app}' has no Core ML package in this bundle")
    return adapter.coreml
