"""Builds tiny programs with coremltools, saves them, and runs them through the executor."""

from collections.abc import Callable, Sequence
from pathlib import Path

import coremltools as ct
import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, types

from ss_convert.coreml.executor import Package, load_package
from ss_convert.coreml.executor.registry import REGISTRY

IOS18 = ct.target.iOS18
_TYPES = {"float32": types.fp32, "float16": types.fp16, "int32": types.int32}
_PLAIN = (types.fp32, types.fp16, types.int32)


def save_program(
    path: Path,
    inputs: dict[str, np.ndarray],
    graph: Callable,
    states: dict[str, tuple[int, ...]] | None = None,
    target=IOS18,
    pipeline=None,
):
    """Save the program of graph(**variables) -> list of results; fp16 states; no folding."""
    specs = {
        name: mb.TensorSpec(value.shape, _TYPES[value.dtype.name]) for name, value in inputs.items()
    }
    for name, shape in (states or {}).items():
        specs[name] = mb.StateTensorSpec(shape, types.fp16)
    with Function(
        {name: mb.placeholder(s.shape, dtype=s.dtype, is_state=hasattr(s, "wrapped"))
         if False else _placeholder(s) for name, s in specs.items()},
        opset_version=target,
    ) as function:
        results = graph(**function.inputs)
        if not isinstance(results, list | tuple):
            results = [results]
        function.set_outputs([_plain(result) for result in results])
    program = Program()
    program.add_function("main", function)
    model = ct.convert(
        program,
        convert_to="mlprogram",
        minimum_deployment_target=target,
        pass_pipeline=pipeline or ct.PassPipeline.EMPTY,
        skip_model_load=True,
    )
    model.save(str(path))
    return model


def _placeholder(spec):
    return mb.placeholder(spec.shape, dtype=spec.dtype) if not hasattr(spec, "x") else spec


def _plain(result):
    """Bool and short integers cannot leave a model; identity keeps outputs distinct."""
    return result if result.dtype in _PLAIN else mb.cast(x=result, dtype="int32")
