"""The same operations where sizes vary from call to call (`tensor.Size`), and what `main` needs besides.

Shapes are known to the compiler as far as they are constant; of the others a graph computes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from coreai import authoring as ca
from coreai._compiler.dialects import coreai as dialect
from coreai.authoring import Value

from ss_convert.coreai.operations import CoreAIOperations
from ss_convert.coreai.tensor import Size, Tensor

# A slice ends where its tensor does, however large its end is said to be.
BEHIND_ALL = np.iinfo(np.int32).max


class DynamicOperations(CoreAIOperations):
    """`CoreAIOperations` for sizes that only a call knows."""

    def reshape(self, x: Tensor, shape: Sequence[int | Size]) -> Tensor:
        unknown = [size for size in shape if isinstance(size, Size) or size == -1]
        if not unknown or not _is_dynamic(x):
            return super().reshape(x, shape)
        if len(unknown) == 1:
            shape = [-1 if isinstance(size, Size) else size for size in shape]
            return Tensor(ca.reshape(x.value, np.array(shape, np.int32)))
        kind = ca.TensorType([-1 if isinstance(size, Size) else size for size in shape], x.value.type.dtype)
        operands = (x.value._to_mlir(), self._sizes(shape).value._to_mlir())
        reshaped = dialect.ReshapeOp(*operands, results=[kind._to_mlir()])
        return Tensor(Value._from_mlir(reshaped.result))

    def expand_dims(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        if not _is_dynamic(x):
            return super().expand_dims(x, axes)
        return Tensor(ca.expand_dims(x.value, np.array(axes, np.int32)))

    def squeeze(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        if not _is_dynamic(x):
            return super().squeeze(x, axes)
        return Tensor(ca.shrink_dims(x.value, np.array(axes, np.int32) % len(x.shape)))

    def slice_by_size(self, x: Tensor, begin: Sequence[int], size: Sequence[int | Size]) -> Tensor:
        """Along axes that vary, everything."""
        ends = []
        for axis, (first, extent) in enumerate(zip(begin, size, strict=True)):
            if isinstance(extent, Size) and (first or extent is not x.shape[axis]):
                raise TypeError("a part of what varies in size is no slice of this kind")
            ends.append(BEHIND_ALL if isinstance(extent, Size) else first + extent)
        ones = np.ones(len(ends), np.int32)
        return Tensor(ca.slice_(x.value, np.array(begin, np.int32), np.array(ends, np.int32), ones))

    def size(self, x: Tensor, axis: int) -> Tensor:
        """int32 [1]: the size of x along `axis`."""
        return self._number(Size(x, axis))

    def leading(self, x: Tensor, axis: int, count: Tensor) -> Tensor:
        """The first `count` (int32 [1]) slices of x along `axis`."""
        ends = [np.array([BEHIND_ALL], np.int32)] * len(x.shape)
        return self._cut(x, axis, np.zeros(len(ends), np.int32), self.concat(_with(ends, axis, count), 0))

    def behind(self, x: Tensor, axis: int, first: Tensor) -> Tensor:
        """The slices of x along `axis` from `first` (int32 [1]) on."""
        begin = [np.zeros(1, np.int32)] * len(x.shape)
        ends = np.full(len(begin), BEHIND_ALL, np.int32)
        return self._cut(x, axis, self.concat(_with(begin, axis, first), 0), ends)

    def _cut(self, x: Tensor, axis: int, begin, ends) -> Tensor:
        """A slice whose bounds along `axis` a call computes; the other axes stay as they are."""
        extents = [-1 if isinstance(size, Size) else size for size in _with(x.shape, axis, -1)]
        kind = ca.TensorType(extents, x.value.type.dtype)
        ones = self._constant(np.ones(len(extents), np.int32))
        bounds = (self._tensor(begin, np.int32), self._tensor(ends, np.int32), ones)
        operands = (each.value._to_mlir() for each in (x, *bounds))
        return Tensor(Value._from_mlir(dialect.SliceOp(*operands, results=[kind._to_mlir()]).result))

    def _sizes(self, shape: Sequence[int | Size]):
        parts = [
            self._number(size) if isinstance(size, Size) else np.array([size], np.int32) for size in shape
        ]
        return self.concat(parts, 0)

    def _number(self, size: Size) -> Tensor:
        """int32 [1]."""
        sizes = Tensor(ca.cast(ca.get_shape(size.tensor.value), np.int32))
        found = super().slice_by_size(sizes, [size.axis], [1])
        return found if size.factor == 1 else self.mul(found, np.array([size.factor]))


def _is_dynamic(x: Tensor) -> bool:
    return any(isinstance(size, Size) for size in x.shape)


def _with(values: Sequence, index: int, value) -> list:
    """The values with another one at `index`."""
    return [*values[:index], value, *values[index + 1 :]]
