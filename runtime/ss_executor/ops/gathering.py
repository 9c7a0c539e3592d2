"""Gather and scatter (MIL: scatter_gather).

Up to iOS 16 a negative index counts from the end. Since iOS 17 it is out of bounds, and what an
index out of bounds gives is undefined: it is an error here, with or without validate_indices.
"""

import numpy as np

from ..errors import ExecutorError
from ..registry import op

_NEGATIVE_INDEX_OPSETS = (5, 6)


def _checked(call, indices, size: int) -> np.ndarray:
    """Indices as non-negative integers below `size`."""
    indices = np.asarray(indices).astype(np.int64)
    if call.opset in _NEGATIVE_INDEX_OPSETS:
        indices = np.where(indices < 0, indices + size, indices)
    if indices.size and (indices.min() < 0 or indices.max() >= size):
        bad = indices[(indices < 0) | (indices >= size)].flat[0]
        raise ExecutorError(f"index {bad} is out of bounds for a size of {size}")
    return indices


@op("gather", exact=True)
def gather(call, x, indices, axis=0, batch_dims=0, validate_indices=False):
    """MIL gather: D[:axis] + N[batch_dims:] + D[axis+1:] for x of shape D, indices of shape N."""
    axis, batch = int(axis) % x.ndim, int(batch_dims)
    indices = _checked(call, indices, x.shape[axis])
    if batch == 0:
        return np.take(x, indices, axis=axis)
    lead = x.shape[:batch]
    rows = x.reshape((-1,) + x.shape[batch:])
    picks = indices.reshape((-1,) + indices.shape[batch:])
    parts = [np.take(r, p, axis=axis - batch) for r, p in zip(rows, picks, strict=True)]
    return np.stack(parts).reshape(lead + parts[0].shape)


@op("gather_along_axis", exact=True)
def gather_along_axis(call, x, indices, axis=0, validate_indices=False):
    """MIL gather_along_axis: result[.., i, ..] = x[.., indices[.., i, ..], ..] along `axis`."""
    axis = int(axis) % x.ndim
    return np.take_along_axis(x, _checked(call, indices, x.shape[axis]), axis=axis)


def _nd_index(call, indices, sizes) -> tuple[np.ndarray, ...]:
    """Last axis of indices -> one index array per leading axis of the data."""
    return tuple(_checked(call, indices[..., i], sizes[i]) for i in range(indices.shape[-1]))


@op("gather_nd", exact=True)
def gather_nd(call, x, indices, batch_dims=0, validate_indices=False):
    """MIL gather_nd: K[:-1] + D[batch_dims + K[-1]:] for x of shape D, indices of shape K."""
    batch = int(batch_dims)
    index = _nd_index(call, indices, x.shape[batch:])
    lead = tuple(np.arange(x.shape[i]).reshape((-1,) + (1,) * (indices.ndim - 2 - i)) for i in range(batch))
    return x[lead + index]


def _assign(target, index, updates):
    target[index] = updates


_MODES = {
    "update": _assign,
    "add": np.add.at,
    "sub": np.subtract.at,
    "mul": np.multiply.at,
    "div": np.divide.at,
    "max": np.maximum.at,
    "min": np.minimum.at,
}


def _scattered(data, index, updates, mode) -> np.ndarray:
    """A copy of data with updates combined in at index; repeated indices combine in turn."""
    if mode not in _MODES:
        raise ExecutorError(f"unknown scatter mode '{mode}'")
    result = data.copy()
    _MODES[mode](result, index, updates)
    return result


@op("scatter")
def scatter(call, data, indices, updates, axis=0, mode="add", validate_indices=False):
    """MIL scatter: slices of `updates` along `axis` combined into data at indices (C,)."""
    axis = int(axis) % data.ndim
    index = (slice(None),) * axis + (_checked(call, indices, data.shape[axis]),)
    return _scattered(data, index, updates, mode)


@op("scatter_along_axis")
def scatter_along_axis(call, data, indices, updates, axis=0, mode="add", validate_indices=False):
    """MIL scatter_along_axis: updates[.., i, ..] combined into data[.., indices[.., i, ..], ..]."""
    axis = int(axis) % data.ndim
    index = list(np.indices(indices.shape, sparse=True))
    index[axis] = _checked(call, indices, data.shape[axis])
    return _scattered(data, tuple(index), updates, mode)


@op("scatter_nd")
def scatter_nd(call, data, indices, updates, mode="add", validate_indices=False):
    """MIL scatter_nd: the last axis of indices addresses the leading axes of data."""
    return _scattered(data, _nd_index(call, indices, data.shape), updates, mode)
