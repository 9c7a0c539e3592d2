"""Values of a Core AI graph with what the graphs ask of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from coreai import authoring as ca
from coreai.authoring import Value

NUMPY_DTYPES = {
    ca.float16: np.float16,
    ca.float32: np.float32,
    ca.int32: np.int32,
    ca.uint32: np.uint32,
    ca.bool_: np.bool_,
}


@dataclass(frozen=True, eq=False)
class Size:
    """A size that only a call knows: `factor` times that of `tensor` along `axis`."""

    tensor: Tensor
    axis: int
    factor: int = 1

    def __mul__(self, factor: int) -> Size:
        return replace(self, factor=self.factor * factor)

    __rmul__ = __mul__


class Tensor:
    """A value with its shape and numpy dtype. What varies from call to call is a `Size` in the shape.

    array: what a constant was made of.
    """

    def __init__(self, value: Value, array: np.ndarray | None = None) -> None:
        self.value, self.array = value, array
        kind = value.type
        self.shape: tuple[int | Size, ...] = tuple(
            extent if extent >= 0 else Size(self, axis) for axis, extent in enumerate(kind.shape)
        )
        self.dtype = NUMPY_DTYPES[kind.dtype]
