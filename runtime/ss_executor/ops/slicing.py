"""Slices (MIL: slice_by_index, slice_by_size, slice_update)."""

import numpy as np

from ..errors import ExecutorError
from ..registry import op


def _slices(x, begin, end, stride, begin_mask, end_mask, squeeze_mask) -> tuple:
    """numpy index of a MIL slice: Python's rules, masks override ends, squeezed axes are ints."""
    rank = x.ndim
    begin, end = np.atleast_1d(begin).tolist(), np.atleast_1d(end).tolist()
    stride = [1] * rank if stride is None else np.atleast_1d(stride).tolist()
    masks = [
        [False] * rank if mask is None else np.atleast_1d(mask).tolist()
        for mask in (begin_mask, end_mask, squeeze_mask)
    ]
    return tuple(
        b if squeezed else slice(None if from_start else b, None if to_end else e, s)
        for b, e, s, from_start, to_end, squeezed in zip(begin, end, stride, *masks, strict=True)
    )


@op("slice_by_index", view=True)
def slice_by_index(call, x, begin, end, stride=None, begin_mask=None, end_mask=None, squeeze_mask=None):
    """MIL slice_by_index: x[begin:end:stride] per axis."""
    return x[_slices(x, begin, end, stride, begin_mask, end_mask, squeeze_mask)]


@op("slice_by_size", view=True)
def slice_by_size(call, x, begin, size):
    """MIL slice_by_size: `size` elements from `begin` per axis; size -1 takes all that follow."""
    index = []
    for axis, (b, s) in enumerate(
        zip(np.atleast_1d(begin).tolist(), np.atleast_1d(size).tolist(), strict=True)
    ):
        b += x.shape[axis] if b < 0 else 0
        end = x.shape[axis] if s == -1 else b + s
        if not 0 <= b <= end <= x.shape[axis]:
            raise ExecutorError(f"slice {b}:{end} is outside axis {axis} of size {x.shape[axis]}")
        index.append(slice(b, end))
    return x[tuple(index)]


@op("slice_update", exact=True)
def slice_update(
    call, x, update, begin, end, stride=None, begin_mask=None, end_mask=None, squeeze_mask=None
):
    """MIL slice_update: x with the slice replaced by `update` of the slice's shape.

    Writes into x when nobody can see it any more (call.in_place).
    """
    index = _slices(x, begin, end, stride, begin_mask, end_mask, squeeze_mask)
    wanted = x[index].shape
    if update.shape != wanted:
        raise ExecutorError(f"the slice has shape {wanted}, the update {update.shape}")
    result = x if call.in_place and x.flags.writeable else x.copy()
    result[index] = update
    return result
