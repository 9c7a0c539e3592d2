"""A saved ML program as plain data: types, constants, operations, blocks. No protobuf, no ops."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class TensorType:
    """Element type name ("float16", "int32", "string", ...) and shape; None is an unknown size."""

    dtype: str
    shape: tuple[int | None, ...] = ()
    state: bool = False


@dataclass(frozen=True)
class Constant:
    """A value in the file. `key` is equal for two constants exactly when they are one value."""

    key: tuple
    type: TensorType
    load: Callable[[], "np.ndarray | str"] = field(compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(size or 1 for size in self.type.shape)


Argument = str | Constant


@dataclass(frozen=True)
class Operation:
    """One operation: parameters are value names or constants, always as lists."""

    type: str
    name: str
    inputs: dict[str, list[Argument]]
    outputs: list[tuple[str, TensorType]]
    blocks: list["Block"] = field(default_factory=list)

    @property
    def label(self) -> str:
        """What to call the operation in messages: its first output, else its own name."""
        return self.outputs[0][0] if self.outputs else self.name

    def names(self) -> Iterator[str]:
        """Names of the values read, those that nested blocks capture included."""
        for arguments in self.inputs.values():
            yield from (argument for argument in arguments if isinstance(argument, str))
        for block in self.blocks:
            yield from block.outputs
            for operation in block.operations:
                yield from operation.names()


@dataclass(frozen=True)
class Block:
    """A straight list of operations with its own inputs; the values in `outputs` leave it."""

    inputs: list[tuple[str, TensorType]]
    operations: list[Operation]
    outputs: list[str]

    def walk(self) -> Iterator[Operation]:
        """Every operation, those of nested blocks included, in the order of the file."""
        for operation in self.operations:
            yield operation
            for block in operation.blocks:
                yield from block.walk()


@dataclass(frozen=True)
class Feature:
    """An input, output or state of a function."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str


@dataclass(frozen=True)
class Function:
    """One function of a package: what goes in and out, and its operations."""

    name: str
    inputs: dict[str, Feature]
    outputs: dict[str, Feature]
    states: dict[str, Feature]
    opset: int
    block: Block = field(repr=False)

    def op_histogram(self) -> dict[str, int]:
        """How often each operation type occurs, constants included, most frequent first."""
        return dict(Counter(operation.type for operation in self.block.walk()).most_common())
