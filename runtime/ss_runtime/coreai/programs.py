"""An asset's program as Apple's local runtime is given it, where that runtime is no device.

The runtime inside the Python wheel multiplies float16 matrices one element at a time, about 30 ns each: a
step of the demo's base takes a minute. `with_wide_products` sums such products in float32 and rounds the
sum once; nothing else changes. `in_float32` computes the whole graph in float32, which shows it without
rounding; weights keep their values.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from coreai._compiler.dialects import coreai as dialect
from coreai._compiler.ir import (
    DenseElementsAttr,
    F16Type,
    F32Type,
    FunctionType,
    InsertionPoint,
    Location,
    OpResult,
    OpView,
    RankedTensorType,
    Type,
    TypeAttr,
    Value,
)
from coreai.authoring import AIProgram
from coreai.authoring.graph_builder import GraphOp

PRODUCTS = ("coreai.batch_matmul", "coreai.decomposable.broadcasting_batch_matmul")
# What is stored in float16 stays so and is cast where it is used; a palette, where it is looked up.
STORED = ("coreai.constant", "coreai.lut_to_dense")


def with_wide_products(program: AIProgram) -> AIProgram:
    """The program with float16 products of matrices computed in float32 and rounded; changed in place."""
    return _rewritten(program, _widen_products)


def in_float32(program: AIProgram) -> AIProgram:
    """The program with every float16 value made float32, stored weights by a cast; changed in place."""
    return _rewritten(program, _retype)


def _rewritten(program: AIProgram, rewrite: Callable[[GraphOp], None]) -> AIProgram:
    module = program._module
    with module._context, Location.unknown():
        for graph in [each for each in module._body.operations if isinstance(each, GraphOp)]:
            rewrite(graph)
        module.verify()
    return program


def _widen_products(graph: GraphOp) -> None:
    for operation in _operations(graph):
        if operation.name in PRODUCTS and _is_half(operation.results[0].type):
            with InsertionPoint(operation):
                wide = [_wide(operand) for operand in operation.operands]
                product = dialect.broadcasting_batch_matmul(*wide)
                operation.results[0].replace_all_uses_with(dialect.cast(product, np.float16))
            operation.operation.erase()


def _retype(graph: GraphOp) -> None:
    for argument in graph.arguments:
        argument.set_type(_widened(argument.type))
    operations = _operations(graph)
    for operation, following in zip(operations, operations[1:], strict=False):
        if operation.name in STORED:
            _cast_stored(operation, following)
        elif operation.name == "coreai.cast" and _is_float(operation):
            operation.results[0].replace_all_uses_with(operation.operands[0])
            operation.operation.erase()
        else:
            for result in operation.results:
                result.set_type(_widened(result.type))
    kinds = [[argument.type for argument in graph.arguments], [value.type for value in graph.outputs]]
    graph.function_type = TypeAttr.get(FunctionType.get(*kinds))


def _cast_stored(operation: OpView, following: OpView) -> None:
    """A stored float16 value in float32, for all but the decompression that it may be a part of."""
    stored = operation.results[0]
    if not _is_half(stored.type):
        return
    uses = [(use.owner, use.operand_number) for use in stored.uses if use.owner.name not in STORED]
    if uses:
        with InsertionPoint(following):
            wide = _wide(stored)
        for owner, number in uses:
            owner.operands[number] = wide


def _wide(value: Value) -> Value:
    """The value in float32, within the operation that is being inserted.

    A constant not by a cast: that of a constant is computed when the program is compiled, and coreai-core
    1.0.0b3 then takes subnormal numbers for much smaller ones. A small one is written anew, a large one is
    widened by the operation for compressed weights, with a scale of 1.
    """
    source = value.owner if OpResult.isinstance(value) else None
    if source is not None and source.name == "coreai.transpose":
        return dialect.transpose(_wide(source.operands[0]), source.operands[1])
    if source is None or source.name != "coreai.constant":
        return dialect.cast(value, np.float32)
    stored = source.attributes["value"]
    if DenseElementsAttr.isinstance(stored):
        return dialect.constant(np.array(DenseElementsAttr(stored), np.float32))
    ones = np.ones((1,) * RankedTensorType(value.type).rank, np.float32)
    return dialect.blockwise_shift_scale(value, ones, np.zeros_like(ones, np.float16), np.zeros_like(ones))


def _is_float(cast: OpView) -> bool:
    """Whether a cast is between the floating-point types: nothing, where both are float32."""
    kinds = (F16Type, F32Type)
    both = (cast.operands[0].type, cast.results[0].type)
    return all(isinstance(RankedTensorType(kind).element_type, kinds) for kind in both)


def _operations(graph: GraphOp) -> list[OpView]:
    return list(graph.entry_block.operations)


def _is_half(kind: Type) -> bool:
    return RankedTensorType.isinstance(kind) and isinstance(RankedTensorType(kind).element_type, F16Type)


def _widened(kind: Type) -> Type:
    """The type with float32 in place of float16, in a handle as well."""
    if dialect.HandleType.isinstance(kind):
        return dialect.HandleType.get(_widened(dialect.HandleType(kind).inner_type))
    if not _is_half(kind):
        return kind
    return RankedTensorType.get(RankedTensorType(kind).shape, F32Type.get())
