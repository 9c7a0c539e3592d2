"""A function of a saved package as the audit sees it: values with types, constants with their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from ss_executor.dtypes import BY_NAME
from ss_executor.graph import Constant, Operation, TensorType
from ss_executor.package import Function


@dataclass(frozen=True)
class Stored:
    """A constant that operations use: its stored pieces (more than one when compressed)."""

    name: str
    operation: str | None
    pieces: tuple[Constant, ...]
    type: TensorType

    @property
    def num_bytes(self) -> int:
        return sum(bytes_of(piece.type) for piece in self.pieces)


@dataclass
class View:
    """One function: operations that run, types of all values, stored constants by value name."""

    function: Function
    operations: list[Operation] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    stored: dict[str, Stored] = field(default_factory=dict)

    def argument(self, operation: Operation, key: str) -> TensorType | None:
        """Type of a parameter; None when it is absent."""
        arguments = operation.inputs.get(key)
        if not arguments:
            return None
        first = arguments[0]
        return first.type if isinstance(first, Constant) else self.types.get(first)

    def weight(self, operation: Operation, key: str) -> Stored | None:
        """The stored constant behind a parameter; None when it is computed."""
        arguments = operation.inputs.get(key)
        if not arguments:
            return None
        first = arguments[0]
        if isinstance(first, Constant):
            return Stored(f"{operation.label}.{key}", None, (first,), first.type)
        return self.stored.get(first)

    def value(self, operation: Operation, key: str):
        """A constant parameter's value; None when it is absent or computed."""
        found = self.weight(operation, key)
        return found.pieces[0].load() if found is not None and found.operation is None else None

    def constants(self) -> Iterator[Stored]:
        """Every stored constant that some operation reads, once."""
        seen = set()
        for operation in self.operations:
            for key in operation.inputs:
                for index, argument in enumerate(operation.inputs[key]):
                    found = self._constant(operation, key, index, argument)
                    if found is not None and found.pieces not in seen:
                        seen.add(found.pieces)
                        yield found

    def _constant(self, operation, key, index, argument) -> Stored | None:
        if isinstance(argument, Constant):
            return Stored(f"{operation.label}.{key}[{index}]", None, (argument,), argument.type)
        return self.stored.get(argument)


def view(function: Function) -> View:
    """Look at a function's operations, nested blocks included."""
    seen = View(function)
    for name, feature in (function.inputs | function.states).items():
        seen.types[name] = TensorType(feature.dtype, feature.shape)
    for operation in function.block.walk():
        seen.types.update(operation.outputs)
        if operation.type == "const":
            source = operation.inputs["val"][0]
            seen.stored[operation.label] = Stored(operation.label, None, (source,), source.type)
        elif operation.type.startswith("constexpr_"):
            pieces = [
                seen.stored[a].pieces if isinstance(a, str) else (a,)
                for v in operation.inputs.values()
                for a in v
            ]
            flat = tuple(piece for group in pieces for piece in group)
            name, type_ = operation.outputs[0]
            seen.stored[name] = Stored(name, operation.type, flat, type_)
        else:
            seen.operations.append(operation)
    return seen


def size_of(type_: TensorType) -> int:
    """Number of elements; an unknown size counts as 1."""
    return math.prod(size or 1 for size in type_.shape)


def bytes_of(type_: TensorType) -> int:
    """Bytes of a value, sub-byte types packed; strings have none."""
    element = BY_NAME.get(type_.dtype)
    return 0 if element is None else -(-size_of(type_) * element.bits // 8)
