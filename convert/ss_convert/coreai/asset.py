"""Functions → a Core AI asset: all of them in one module, equal constants once, one state for all.

The state goes in as an argument whose value after the call is a result; Core AI's compiler makes a handle
of the pair that the caller owns and passes to every call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from coreai import authoring as ca
from coreai._compiler.ir import ArrayAttr, DictAttr, StringAttr
from coreai.authoring import Value
from coreai.authoring.graph_builder import GraphOp
from coreai.runtime import AIModelAssetMetadata

from ss_convert.coreai.composites import Composites
from ss_convert.coreai.constants import Constants
from ss_convert.coreai.dynamic_operations import DynamicOperations
from ss_convert.coreai.operations import CoreAIOperations
from ss_convert.coreai.tensor import Tensor
from ss_convert.graph.functions import GraphFunction
from ss_convert.graph.operations import writing_in

DTYPES = {"float16": np.float16, "int32": np.int32}
# The compiler makes an argument a state where this names the result that is its value after the call.
MUTATED = "MutableBuffers.buffer_mutation"
AFTER = "{}_after"
METADATA = "metadata.json"


def write_asset(
    functions: Iterable[GraphFunction],
    path: Path,
    metadata: Mapping[str, str],
    half_only: bool = False,
    earlier: tuple[Path, set[str]] | None = None,
) -> None:
    """Write functions as one `.aimodel` to `path`, where nothing may be.

    metadata: what the asset says of itself; half_only: as in `CoreAIOperations`; earlier: an asset and the
    names of its functions that are taken over.
    """
    module = ca.Module.create() if earlier is None else _opened(*earlier)
    with module:
        composites, constants = Composites(module), Constants()
        for function in functions:
            _add(function, _operations_of(function)(composites, half_only, constants))
    described = AIModelAssetMetadata()
    described.model_description = json.dumps(dict(metadata), sort_keys=True)
    ca.AIProgram(module).save_asset(path, described)
    _make_reproducible(path)


def _opened(path: Path, kept: set[str]) -> ca.Module:
    """The module of an asset with those of its functions alone, and the private graphs that they call."""
    module = ca.AIModelAsset.load(path).program._module
    with module._context:
        graphs = {
            each.sym_name.value: each for each in module._body.operations if isinstance(each, GraphOp)
        }
        called = kept.union(*(_callees(graphs[name]) for name in kept))
        for name, graph in graphs.items():
            if name not in called:
                graph.operation.erase()
    return module


def _callees(graph: GraphOp) -> set[str]:
    """Names of the private graphs that an entry point calls; those call none."""
    calls = (each for each in graph.entry_block.operations if each.name == "coreai.invoke")
    # Written as @name, or as a constant of that.
    return {re.search(r"@(\w+)", str(each.attributes["callee"])).group(1) for each in calls}


def _operations_of(function: GraphFunction) -> type[CoreAIOperations]:
    """Those for sizes that vary where an input or a state has one (-1)."""
    shapes = [shape for _, shape in (function.inputs | function.states).values()]
    return DynamicOperations if any(-1 in shape for shape in shapes) else CoreAIOperations


def _add(function: GraphFunction, operations: CoreAIOperations) -> None:
    """Build a function into the module that is being written."""
    shapes = function.inputs | function.states
    types = [ca.TensorType(shape, DTYPES[dtype])._to_mlir() for dtype, shape in shapes.values()]
    operations.composites.function = function.name
    graph = GraphOp(function.name, types, [], input_names=list(shapes))
    with graph.block, writing_in(operations):
        inputs = {
            name: Tensor(Value._from_mlir(argument))
            for name, argument in zip(shapes, graph.arguments, strict=True)
        }
        states = {name: [inputs[name]] for name in function.states}
        outputs = function.body(inputs | states)
        outputs = outputs | {AFTER.format(name): values[-1] for name, values in states.items()}
        graph.outputs_spec = [(name, value.value._to_mlir()) for name, value in outputs.items()]
    _mark_states(graph, {list(shapes).index(name): AFTER.format(name) for name in states})


def _mark_states(graph: GraphOp, results: Mapping[int, str]) -> None:
    """Say which arguments are states, and the results that are their new values."""
    attributes = [{entry.name: entry.attr for entry in each} for each in graph.arg_attrs]
    for index, name in results.items():
        attributes[index][MUTATED] = StringAttr.get(name)
    graph.arg_attrs = ArrayAttr.get([DictAttr.get(each) for each in attributes])


def _make_reproducible(path: Path) -> None:
    """The same asset, byte for byte, from the same inputs: the date of creation is taken out."""
    file = path / METADATA
    raw = json.loads(file.read_text(encoding="utf-8"))
    raw.pop("creationDate", None)
    file.write_text(json.dumps(raw, indent=1, sort_keys=True) + "\n", encoding="utf-8")
