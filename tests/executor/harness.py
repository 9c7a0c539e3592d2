"""Builds tiny programs with coremltools, saves them, and runs them through the executor."""

from collections.abc import Callable, Sequence
from pathlib import Path

import coremltools as ct
import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types

from ss_executor import load_package

IOS18 = ct.target.iOS18
_TYPES = {"float32": types.fp32, "float16": types.fp16, "int32": types.int32}
_PLAIN = tuple(_TYPES.values())

# A graph takes its variables by name and returns the list of its results.
Graph = Callable[..., Sequence]


def save_program(
    path: Path,
    graph: Graph,
    inputs: dict[str, np.ndarray],
    states: dict[str, tuple[int, ...]] | None = None,
    target=IOS18,
    passes: bool = False,
):
    """Save graph's program; without `passes` nothing is folded or fused. Returns the model.

    The parameters of `graph` are the inputs and states in this order; states are fp16.
    """
    specs = [mb.TensorSpec(value.shape, _TYPES[value.dtype.name]) for value in inputs.values()]
    specs += [mb.StateTensorSpec(shape, types.fp16) for shape in (states or {}).values()]
    program = mb.program(input_specs=specs, opset_version=target)(graph)
    model = ct.convert(
        program,
        convert_to="mlprogram",
        minimum_deployment_target=target,
        compute_precision=ct.precision.FLOAT32,
        pass_pipeline=None if passes else ct.PassPipeline.EMPTY,
    )
    model.save(str(path))
    return model


def plain(results):
    """Bool and short integers cannot leave a model: as int32."""
    return [r if r.dtype in _PLAIN else mb.cast(x=r, dtype="int32") for r in results]


def run_graph(
    tmp_path: Path,
    graph: Graph,
    inputs: dict[str, np.ndarray],
    dtype: str = "float32",
    target=IOS18,
) -> list[np.ndarray]:
    """Save, load and run a graph without states; its results in order."""
    path = tmp_path / "graph.mlpackage"
    save_program(path, graph, inputs, target=target)
    outputs = load_package(path).program("main", dtype).predict(inputs)
    return list(outputs.values())


def check_cases(
    tmp_path: Path,
    inputs: dict[str, np.ndarray],
    cases: list[tuple[Callable, "np.ndarray | list[np.ndarray]"]],
    tolerance: float = 1e-5,
    target=IOS18,
) -> None:
    """Run many small graphs in one program; each case is (builder of results, expected arrays).

    A builder takes the dictionary of input variables and returns one variable or several.
    """
    expected: list[np.ndarray] = []
    names = list(inputs)

    def build(variables):
        results = []
        for builder, wanted in cases:
            made = builder(variables)
            made = list(made) if isinstance(made, list | tuple) else [made]
            wanted = wanted if isinstance(wanted, list) else [wanted]
            assert len(made) == len(wanted)
            results += made
            expected.extend(wanted)
        return plain(results)

    scope = {"build": build}
    arguments = ", ".join(names)
    exec(f"def graph({arguments}):\n    return build(dict(locals()))", scope)
    results = run_graph(tmp_path, scope["graph"], inputs, target=target)
    assert len(results) == len(expected)
    for index, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        wanted = np.asarray(wanted)
        assert result.shape == wanted.shape, f"result {index}"
        if result.dtype.kind == "f":
            np.testing.assert_allclose(
                result, wanted, rtol=tolerance, atol=tolerance, err_msg=f"result {index}"
            )
        else:
            np.testing.assert_array_equal(result, wanted, err_msg=f"result {index}")


def elementwise(function: Callable, *arrays: np.ndarray) -> np.ndarray:
    """Apply a Python function element by element, with Python floats or ints."""
    arrays = np.broadcast_arrays(*arrays)
    flat = [function(*(item.item() for item in items)) for items in zip(
        *(a.reshape(-1) for a in arrays), strict=True)]  # fmt: skip
    return np.array(flat).reshape(arrays[0].shape)
