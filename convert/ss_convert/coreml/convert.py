"""From an adapter and its base to a Core ML package (ARCHITECTURE.md)."""

from __future__ import annotations

from pathlib import Path

import coremltools as ct
import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, types

from ss_convert.coreml.operations import MILOperations
from ss_convert.coreml.package import save_package
from ss_convert.graph.description import describe, package_metadata
from ss_convert.graph.functions import GraphFunction, adapter_functions, base_weights
from ss_convert.graph.interface import STATE
from ss_convert.graph.operations import writing_in
from ss_convert.graph.options import GraphOptions
from ss_convert.graph.parts import Part, part_names, parts_of
from ss_convert.graph.weights import BaseWeights
from ss_device.adapter import Adapter
from ss_device.architecture import Architecture
from ss_device.bundle import StepFunctions

__all__ = ["GraphOptions", "build_programs", "write_package"]

DTYPES = {"int32": types.int32, "float16": types.fp16}


def write_package(
    architecture: Architecture,
    weights: dict[str, np.ndarray],
    adapter: Adapter,
    options: GraphOptions,
    path: Path,
) -> StepFunctions:
    """Write an adapter's prefill and step functions as one `.mlpackage` that stores the base once.

    With `options.cuts` a package per part is written beside `path` (`parts.part_names`). weights:
    canonical names (`BaseFolder.weights()`). The package's inputs and outputs are described
    in `interface.py`. The result's `package` is `<folder>/<name>` of `path`, its place in a bundle.
    Raises UserError when adapter, base and options do not fit each other or a weight exceeds fp16.
    """
    path = Path(path)
    base = base_weights(architecture, weights, options)
    parts = parts_of(architecture, options.cuts)
    names = part_names(path.stem, len(parts))
    packages = [f"{path.parent.name}/{name}" for name in names]
    functions = describe(adapter, architecture, options, packages)
    for index, (part, name) in enumerate(zip(parts, names, strict=True)):
        programs = build_programs(architecture, base, adapter, options, part)
        metadata = package_metadata(adapter.base, {adapter.app: (adapter.config, functions)}, index)
        save_package(programs, default=functions.step, metadata=metadata, path=path.parent / name)
    return functions


def build_programs(
    architecture: Architecture,
    weights: dict[str, np.ndarray] | BaseWeights,
    adapter: Adapter,
    options: GraphOptions,
    part: Part | None = None,
) -> dict[str, Program]:
    """MIL programs with a single `main` by function name, prefill first; of one part, or of all layers."""
    functions = adapter_functions(architecture, weights, adapter, options, part)
    return {function.name: _program(function) for function in functions}


def _program(function: GraphFunction) -> Program:
    """A program with the function as its `main`."""
    inputs = {n: mb.placeholder(shape=shape, dtype=DTYPES[d]) for n, (d, shape) in function.inputs.items()}
    inputs[STATE] = mb.state_tensor_placeholder(shape=function.state, dtype=types.fp16)
    with Function(inputs, opset_version=ct.target.iOS18) as built:
        with writing_in(MILOperations()):
            outputs = function.body(dict(built.inputs))
        for name, variable in outputs.items():
            variable.set_name(name)
        built.set_outputs(list(outputs.values()))
    program = Program()
    program.add_function("main", built)
    return program
