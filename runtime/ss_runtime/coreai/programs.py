"""An asset's program as Apple's local runtime is given it, where that runtime is no device.

The runtime inside the Python wheel multiplies float16 matrices one element at a time, about 30 ns each: a
step of the demo's base takes a minute. `with_wide_products` sums such products in float32 and rounds the
sum once; nothing else changes. `in_float32` computes the whole graph in float32, which shows it without
rounding; weights keep their values.
"""

from __future__ import annotations

import re
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
# A large constant as MLIR prints it: four bytes of alignment in front of the values.
LARGE_CONSTANT = re.compile(r'(\w+): "0x[0-9A-F]{8}([0-9A-F]*)"')
LARGEST_PRINTED = 500_000_000
LARGE_NAME = re.compile(r"dense_resource<(\w+)>")


def with_wide_products(program: AIProgram, size: int) -> AIProgram:
    """The program with float16 products of matrices computed in float32 and rounded; changed in place.

    size: bytes that it takes on the disk.
    """
    return _rewritten(program, size, _Rewriting.widen_products)


def in_float32(program: AIProgram, size: int) -> AIProgram:
    """The program with every float16 value made float32; changed in place."""
    return _rewritten(program, size, _Rewriting.retype)


def _rewritten(program: AIProgram, size: int, rewrite: Callable[[_Rewriting, GraphOp], None]) -> AIProgram:
    module = program._module
    with module._context, Location.unknown():
        rewriting = _Rewriting(str(module) if size <= LARGEST_PRINTED else "")
        for graph in [each for each in module._body.operations if isinstance(each, GraphOp)]:
            rewrite(rewriting, graph)
        module.verify()
    return program


class _Rewriting:
    """The change of one program's functions.

    text: the program, where large constants stand in full, since the bindings do not hand out their values
    of float16; empty for a program that is too large to be printed.
    """

    def __init__(self, text: str) -> None:
        self._large = {name: bytes.fromhex(values) for name, values in LARGE_CONSTANT.findall(text)}

    def widen_products(self, graph: GraphOp) -> None:
        for operation in _operations(graph):
            if operation.name in PRODUCTS and _is_half(operation.results[0].type):
                with InsertionPoint(operation):
                    wide = [self._wide(operand) for operand in operation.operands]
                    product = dialect.broadcasting_batch_matmul(*wide)
                    operation.results[0].replace_all_uses_with(dialect.cast(product, np.float16))
                operation.operation.erase()

    def retype(self, graph: GraphOp) -> None:
        for argument in graph.arguments:
            argument.set_type(_widened(argument.type))
        operations = _operations(graph)
        for operation, following in zip(operations, operations[1:], strict=False):
            if operation.name in STORED:
                self._widen_stored(operation, following)
            elif operation.name == "coreai.cast" and _is_float(operation):
                operation.results[0].replace_all_uses_with(operation.operands[0])
                operation.operation.erase()
            else:
                for result in operation.results:
                    result.set_type(_widened(result.type))
        kinds = [[each.type for each in graph.arguments], [each.type for each in graph.outputs]]
        graph.function_type = TypeAttr.get(FunctionType.get(*kinds))

    def _widen_stored(self, operation: OpView, following: OpView) -> None:
        """A stored float16 value in float32, for all but the decompression that it may be a part of."""
        stored = operation.results[0]
        if not _is_half(stored.type):
            return
        uses = [(use.owner, use.operand_number) for use in stored.uses if use.owner.name not in STORED]
        if uses:
            with InsertionPoint(following):
                wide = self._wide(stored)
            for owner, number in uses:
                owner.operands[number] = wide

    def _wide(self, value: Value) -> Value:
        """The value in float32, where operations are being inserted.

        A constant is written anew: a cast of one is computed when the program is compiled, and coreai-core
        1.0.0b3 then takes subnormal numbers for much smaller ones. One that was not printed is widened in
        every call, by the operation for compressed weights with a scale of 1.
        """
        source = value.owner if OpResult.isinstance(value) else None
        if source is not None and source.name == "coreai.transpose":
            return dialect.transpose(self._wide(source.operands[0]), source.operands[1])
        if source is None or source.name != "coreai.constant":
            return dialect.cast(value, np.float32)
        stored = source.attributes["value"]
        if DenseElementsAttr.isinstance(stored):
            return dialect.constant(np.array(DenseElementsAttr(stored), np.float32))
        name, kind = LARGE_NAME.match(str(stored)).group(1), RankedTensorType(value.type)
        if name in self._large:
            values = np.frombuffer(self._large[name], np.float16).astype(np.float32)
            return dialect.constant(values.reshape(kind.shape))
        one = np.ones((1,) * kind.rank, np.float32)
        nothing = np.zeros_like(one)
        return dialect.blockwise_shift_scale(value, one, nothing.astype(np.float16), nothing)


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
