"""Values of a Core AI graph with what the graphs ask of them."""

from __future__ import annotations

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


class Tensor:
    """A value with its shape and numpy dtype."""

    def __init__(self, value: Value) -> None:
        self.value = value
        kind = value.type
        self.shape: tuple[int, ...] = tuple(kind.shape)
        self.dtype = NUMPY_DTYPES[kind.dtype]
