"""From an adapter and its base to a Core ML package (DESIGN: Core ML graph)."""

from __future__ import annotations

from pathlib import Path

import coremltools as ct
import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, types

from ss_convert.coreml.interface import (
    STATE,
    Shapes,
    function_names,
    num_slots,
    prefill_inputs,
    state_shape,
    step_inputs,
)
from ss_convert.coreml.layers import Decoder
from ss_convert.coreml.options import CoreMLOptions
from ss_convert.coreml.package import save_package
from ss_convert.coreml.prefill_function import build_prefill
from ss_convert.coreml.step_function import build_step
from ss_convert.coreml.tables import rotary_table
from ss_convert.coreml.weights import ExportWeights
from ss_device.adapter import Adapter
from ss_device.architecture import Architecture
from ss_device.bundle import CoreMLFunctions

__all__ = ["CoreMLOptions", "build_programs", "write_package"]

DTYPES = {"int32": types.int32, "float16": types.fp16}


def write_package(
    architecture: Architecture,
    weights: dict[str, np.ndarray],
    adapter: Adapter,
    options: CoreMLOptions,
    path: Path,
) -> CoreMLFunctions:
    """Write an adapter's prefill and step functions as one `.mlpackage` that stores the base once.

    weights: canonical names (`BaseFolder.weights()`). The package's inputs and outputs are described
    in `interface.py`. The result's `package` is `<folder>/<name>` of `path`, its place in a bundle.
    Raises UserError when adapter, base and options do not fit each other or a weight exceeds fp16.
    """
    path = Path(path)
    programs = build_programs(architecture, weights, adapter, options)
    prefill, step = programs
    functions = CoreMLFunctions(
        package=f"{path.parent.name}/{path.name}",
        prefill=prefill,
        step=step,
        chunk=options.chunk,
        num_nodes=options.num_nodes,
        num_kept=options.num_kept,
        context=options.context,
        prune_over=options.prune_over,
    )
    save_package(programs, default=step, metadata=_metadata(adapter, functions), path=path)
    return functions


def build_programs(
    architecture: Architecture,
    weights: dict[str, np.ndarray],
    adapter: Adapter,
    options: CoreMLOptions,
) -> dict[str, Program]:
    """MIL programs with a single `main` by function name, prefill first."""
    options.check(architecture)
    config = adapter.config
    constants = ExportWeights(architecture, weights, adapter)
    table = rotary_table(architecture, num_slots(options) + config.num_streams + 1)
    prefill, step = function_names(adapter.app)

    def prefill_body(inputs: dict) -> dict:
        return build_prefill(Decoder(architecture, constants), options, table, inputs)

    def step_body(inputs: dict) -> dict:
        return build_step(Decoder(architecture, constants), config, options, table, inputs)

    state = state_shape(architecture, options)
    return {
        prefill: _program(prefill_inputs(options), state, prefill_body),
        step: _program(step_inputs(config, options), state, step_body),
    }


def _program(shapes: Shapes, state: tuple[int, ...], body) -> Program:
    """A program around `body`, a function from inputs to outputs, both by name."""
    inputs = {n: mb.placeholder(shape=shape, dtype=DTYPES[d]) for n, (d, shape) in shapes.items()}
    inputs[STATE] = mb.state_tensor_placeholder(shape=state, dtype=types.fp16)
    with Function(inputs, opset_version=ct.target.iOS18) as function:
        outputs = body(dict(function.inputs))
        for name, variable in outputs.items():
            variable.set_name(name)
        function.set_outputs(list(outputs.values()))
    program = Program()
    program.add_function("main", function)
    return program


def _metadata(adapter: Adapter, functions: CoreMLFunctions) -> dict[str, str]:
    """What a package says of itself, as strings."""
    return {
        "app": adapter.app,
        "base": adapter.base.name,
        "base_sha256": adapter.base.sha256,
        "mode": adapter.config.mode,
        "num_streams": str(adapter.config.num_streams),
        "num_nodes": str(functions.num_nodes),
        "num_kept": str(functions.num_kept),
        "context": str(functions.context),
        "chunk": str(functions.chunk),
        "prune_over": functions.prune_over,
    }
