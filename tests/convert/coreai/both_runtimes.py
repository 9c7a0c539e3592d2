"""The same functions on both runtimes, and how their numbers are compared.

A package runs on the reference executor in float16, an asset on Apple's runtime.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ss_convert.coreml.convert import _program
from ss_convert.coreml.package import save_package
from ss_convert.graph.functions import GraphFunction
from ss_convert.graph.interface import STATE
from ss_convert.graph.operations import op
from ss_executor import load_package

# On a Mac too it is the wheel's runtime that these tests are about.
os.environ.setdefault("USE_LOCAL_COREAI", "1")


@dataclass(frozen=True)
class Expected:
    """What a runtime should give, and how far off it may be: `ulps` units in the last place of the value,
    or `slack` as an absolute error. zero_signs: whether -0 differs from 0. NaN equals NaN."""

    values: np.ndarray
    ulps: int = 0
    slack: np.ndarray | float = 0.0
    zero_signs: bool = True

    def misses(self, found: np.ndarray) -> np.ndarray:
        """Where `found`, of the same shape and dtype, is something else."""
        assert (found.shape, found.dtype) == (self.values.shape, self.values.dtype)
        wrong = ~same_bits(found, self.values)
        if not self.zero_signs:
            wrong &= ~((found == 0) & (self.values == 0))
        if self.ulps:
            wrong &= ~(ulps(found, self.values) <= self.ulps)
        if np.any(self.slack):
            finite = np.isfinite(found) & np.isfinite(self.values)
            errors = np.abs(np.where(finite, found, 0).astype(float) - np.where(finite, self.values, 0))
            wrong &= ~(finite & (errors <= self.slack))
        return wrong


@dataclass(frozen=True)
class Case:
    """One use of an operation.

    build: the values of `inputs` (fp16 or int32) in their order → the operation's value, fp16 or int32;
    executor, apple: what each runtime should give, one object where both should give the same.
    """

    name: str
    build: Callable
    inputs: dict[str, np.ndarray]
    executor: Expected
    apple: Expected


def function_of(name: str, cases: Sequence[Case]) -> tuple[GraphFunction, dict[str, np.ndarray]]:
    """A function whose outputs are the cases by name, and its inputs."""
    inputs = {f"{case.name}_{key}": array for case in cases for key, array in case.inputs.items()}

    def body(values: dict) -> dict:
        # A MIL function must use its state.
        outputs = {"state_before": op.identity(op.read_state(values[STATE]))}
        for case in cases:
            outputs[case.name] = case.build(*(values[f"{case.name}_{key}"] for key in case.inputs))
        return outputs

    return graph_function(name, inputs, (1, 1, 1, 1), body), inputs


def graph_function(
    name: str, inputs: Mapping[str, np.ndarray], state: tuple[int, ...], body: Callable[[dict], dict]
) -> GraphFunction:
    """A function that takes arrays like `inputs`."""
    return GraphFunction(name, {key: (a.dtype.name, a.shape) for key, a in inputs.items()}, state, body)


class BothRuntimes:
    """Functions written in both dialects. half_only: as in `CoreAIOperations`."""

    def __init__(self, functions: Sequence[GraphFunction], folder: Path, half_only: bool = False) -> None:
        from ss_convert.coreai.asset import write_asset

        self._asset, package = folder / "cases.aimodel", folder / "cases.mlpackage"
        write_asset(functions, self._asset, {}, half_only)
        save_package({f.name: _program(f) for f in functions}, functions[0].name, {}, package)
        self._package = load_package(package)

    def executor(self, name: str, inputs: Mapping[str, np.ndarray], state: np.ndarray | None = None):
        """→ (outputs by name, the state after the call); a state of zeros unless one is given."""
        program = self._package.program(name, "float16")
        states = program.make_state()
        if state is not None:
            states[STATE] = state.astype(np.float32)
        outputs = program.predict(inputs, states)
        return outputs, states[STATE].astype(np.float16)

    def apple(self, name: str, inputs: Mapping[str, np.ndarray], state: np.ndarray | None = None):
        """The same on Apple's runtime."""
        return asyncio.run(self._on_apples(name, inputs, state))

    async def _on_apples(self, name: str, inputs: Mapping[str, np.ndarray], state: np.ndarray | None):
        from coreai.authoring import AIModelAsset
        from coreai.runtime import NDArray

        async with AIModelAsset.load(self._asset).executable() as model:
            function = model.load_function(name)
            if state is None:
                state = np.zeros(tuple(function.desc.state_descriptor(STATE).shape), np.float16)
            states = {STATE: NDArray(state.copy())}
            given = {key: NDArray(np.ascontiguousarray(array)) for key, array in inputs.items()}
            outputs = await function(given, states)
            copies = {key: value.numpy().copy() for key, value in outputs.items()}
            return copies, states[STATE].numpy().copy()


def same_bits(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Where values are the same, NaN equal to NaN and -0 different from 0."""
    if x.dtype.kind != "f":
        return x == y
    return (np.isnan(x) & np.isnan(y)) | (x.view(np.int16) == y.view(np.int16))


def ulps(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """fp16 values between two; NaN lies infinitely far from all others, infinity one behind the last."""
    places = [
        np.where(v.view(np.int16) < 0, -1, 1) * (v.view(np.int16) & 0x7FFF).astype(float) for v in (x, y)
    ]
    unordered = np.isnan(x) != np.isnan(y)
    return np.where(unordered, np.inf, np.abs(places[0] - places[1]))
