"""Making and combining tensors (MIL: tensor_operation, fill, concat, pad, one_hot, cumsum ...)."""

import numpy as np

from ..errors import ExecutorError
from ..registry import op


@op("identity", view=True)
def identity(call, x):
    """MIL identity."""
    return x


@op("shape")
def shape(call, x):
    """MIL shape: sizes of x as a vector."""
    return np.array(x.shape)


@op("fill")
def fill(call, shape, value=0.0):
    """MIL fill: a tensor of a given shape and one value."""
    return np.full(tuple(np.atleast_1d(shape).tolist()), value)


@op("fill_like")
def fill_like(call, ref_tensor, value=0.0):
    """MIL fill_like: a tensor of one value in the shape of another."""
    return np.full(ref_tensor.shape, value)


@op("range_1d")
def range_1d(call, start, end, step):
    """MIL range_1d: start, start + step, ... up to and without end."""
    count = max(0, int(np.ceil((float(end) - float(start)) / float(step))))
    return start + np.arange(count).astype(start.dtype) * step


@op("concat", exact=True, tuples=("values",))
def concat(call, values, axis, interleave=False):
    """MIL concat along `axis`; interleaved: first slices of all inputs, then the second ones."""
    axis = int(axis)
    if not bool(interleave):
        return np.concatenate(values, axis=axis)
    axis %= values[0].ndim
    stacked = np.stack(values, axis=axis + 1)
    sizes = list(values[0].shape)
    sizes[axis] *= len(values)
    return stacked.reshape(sizes)


@op("stack", exact=True, tuples=("values",))
def stack(call, values, axis):
    """MIL stack along a new axis."""
    return np.stack(values, axis=int(axis))


@op("split", view=True)
def split(call, x, axis, num_splits=None, split_sizes=None):
    """MIL split along `axis` into equal parts or parts of given sizes."""
    axis = int(axis)
    if split_sizes is None:
        return tuple(np.split(x, int(num_splits), axis=axis))
    ends = np.cumsum(np.atleast_1d(split_sizes))
    if ends[-1] != x.shape[axis]:
        raise ExecutorError(f"split sizes add up to {ends[-1]}, the axis has {x.shape[axis]}")
    return tuple(np.split(x, ends[:-1].tolist(), axis=axis))


@op("tile", exact=True)
def tile(call, x, reps):
    """MIL tile: x repeated reps[i] times along axis i."""
    return np.tile(x, tuple(np.atleast_1d(reps).tolist()))


_PAD_MODES = {"reflect": "reflect", "replicate": "edge"}


@op("pad", exact=True)
def pad(call, x, pad, mode="constant", constant_val=0.0):
    """MIL pad: pairs (before, after) for the last len(pad) / 2 axes."""
    pairs = [(int(a), int(b)) for a, b in np.asarray(pad).reshape(-1, 2)]
    pairs = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    if mode == "constant":
        return np.pad(x, pairs, constant_values=np.asarray(constant_val).astype(x.dtype))
    if mode not in _PAD_MODES:
        raise ExecutorError(f"unknown pad mode '{mode}'")
    return np.pad(x, pairs, mode=_PAD_MODES[mode])


@op("one_hot", exact=True)
def one_hot(call, indices, one_hot_vector_size, axis=-1, on_value=1, off_value=0):
    """MIL one_hot: a new axis with on_value at the index; an index outside has none."""
    size = int(one_hot_vector_size)
    axis = int(axis) % (indices.ndim + 1)
    places = np.arange(size).reshape((-1,) + (1,) * (indices.ndim - axis))
    return np.where(np.expand_dims(indices, axis) == places, on_value, off_value)


@op("cumsum")
def cumsum(call, x, axis=0, exclusive=False, reverse=False):
    """MIL cumsum along `axis`; exclusive: without the element itself; reverse: from the end."""
    axis = int(axis)
    x = np.flip(x, axis) if bool(reverse) else x
    total = np.cumsum(x, axis=axis, dtype=x.dtype)
    if bool(exclusive):
        total = np.roll(total, 1, axis=axis)
        total[(slice(None),) * (axis % x.ndim) + (0,)] = 0
    return np.flip(total, axis) if bool(reverse) else total


@op("non_zero")
def non_zero(call, x):
    """MIL non_zero: one row of indices per element that is not 0."""
    return np.argwhere(x)


@op("band_part", exact=True)
def band_part(call, x, lower=-1, upper=-1):
    """MIL band_part: zero outside a band of the last two axes; a negative width keeps all."""
    lower, upper = int(lower), int(upper)
    m, n = np.arange(x.shape[-2])[:, None], np.arange(x.shape[-1])[None, :]
    band = ((lower < 0) | (m - n <= lower)) & ((upper < 0) | (n - m <= upper))
    return np.where(band, x, np.zeros((), x.dtype))
