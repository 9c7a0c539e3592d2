"""Index vectors as one-hot matrices, so that rows are moved by products instead of gathers.

Every sum has one term that is not zero, so a selection is exact in any precision.
"""

from __future__ import annotations

import numpy as np
from coremltools.converters.mil import Builder as mb


def one_hot(indices, width: int):
    """int32 [n] → fp16 [n, width]; an index outside 0..width-1 gives a row of zeros."""
    columns = np.arange(width, dtype=np.int32)[None]
    equal = mb.equal(x=mb.expand_dims(x=indices, axes=[1]), y=columns)
    return mb.cast(x=equal, dtype="fp16")


def column(vector):
    """[n] → [n, 1]."""
    return mb.expand_dims(x=vector, axes=[1])


def row(vector):
    """[n] → [1, n]."""
    return mb.expand_dims(x=vector, axes=[0])


def row_sums(matrix):
    """[n, m] → [n]."""
    return mb.reduce_sum(x=matrix, axes=[-1], keep_dims=False)


def select(selection, rows):
    """One-hot [k, n] of rows [n, w] → [k, w]; without a selection the rows themselves."""
    return rows if selection is None else mb.matmul(x=selection, y=rows)


def as_number(condition):
    """bool → fp16 0 or 1."""
    return mb.cast(x=condition, dtype="fp16")
