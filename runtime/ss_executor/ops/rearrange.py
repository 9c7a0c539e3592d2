"""Same elements, other places (MIL: tensor_transformation)."""

import math

import numpy as np

from ..errors import ExecutorError
from ..registry import op


@op("reshape", view=True)
def reshape(call, x, shape):
    """MIL reshape. -1 takes what is left; 0 takes the size of x counted from the right, or 1.

    For a shape as long as x's rank this is also the iOS 15 rule.
    """
    shape = np.atleast_1d(shape).tolist()
    shift = x.ndim - len(shape)
    sizes = [
        size if size != 0 else x.shape[i + shift] if i + shift >= 0 else 1 for i, size in enumerate(shape)
    ]
    return np.reshape(x, sizes)


@op("reshape_like", view=True, tuples=("ref_tensors", "begins", "ends", "end_masks"))
def reshape_like(call, x, ref_tensors, begins, ends, end_masks):
    """MIL reshape_like: sizes collected from ranges of the shapes of other tensors."""
    sizes: list[int] = []
    for ref, begin, end, to_end in zip(ref_tensors, begins, ends, end_masks, strict=True):
        sizes += ref.shape[int(begin) : None if bool(to_end) else int(end)]
    return np.reshape(x, sizes)


@op("flatten2d", view=True)
def flatten2d(call, x, axis=1):
    """MIL flatten2d: the axes before `axis` folded into one, the others into another."""
    axis = int(axis) % x.ndim if int(axis) < 0 else int(axis)
    return np.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@op("transpose", view=True)
def transpose(call, x, perm):
    """MIL transpose."""
    return np.transpose(x, np.atleast_1d(perm).tolist())


@op("expand_dims", view=True)
def expand_dims(call, x, axes):
    """MIL expand_dims: axes count in the result."""
    return np.expand_dims(x, tuple(np.atleast_1d(axes).tolist()))


@op("squeeze", view=True)
def squeeze(call, x, axes=None):
    """MIL squeeze; an axis whose size is not 1 is left alone, as in PyTorch."""
    axes = range(x.ndim) if axes is None else np.atleast_1d(axes).tolist()
    gone = {axis % x.ndim for axis in axes if x.shape[axis] == 1}
    return np.reshape(x, [size for axis, size in enumerate(x.shape) if axis not in gone])


@op("reverse", view=True)
def reverse(call, x, axes=None):
    """MIL reverse along `axes` (default all)."""
    return np.flip(x, None if axes is None else tuple(np.atleast_1d(axes).tolist()))


@op("reverse_sequence", exact=True)
def reverse_sequence(call, x, lengths, seq_axis=0, batch_axis=0):
    """MIL reverse_sequence: the first lengths[i] elements of batch entry i, back to front."""
    moved = np.moveaxis(x, (int(batch_axis), int(seq_axis)), (0, 1))
    result = moved.copy()
    for i, length in enumerate(np.atleast_1d(lengths).tolist()):
        result[i, :length] = moved[i, :length][::-1]
    return np.moveaxis(result, (0, 1), (int(batch_axis), int(seq_axis)))


@op("sliding_windows", view=True)
def sliding_windows(call, x, axis, size, stride=1):
    """MIL sliding_windows: (..., d, ...) -> (..., windows, size, ...) at `axis`."""
    axis = int(axis) % x.ndim
    view = np.lib.stride_tricks.sliding_window_view(x, int(size), axis=axis)
    view = view[(slice(None),) * axis + (slice(None, None, int(stride)),)]
    return np.moveaxis(view, -1, axis + 1)


def _blocks_out(x, block, order):
    """x (n, C, H, W): axes (n, *split of C, H, W) permuted by `order` -> block times larger."""
    n, c, h, w = x.shape
    if c % (block * block):
        raise ExecutorError(f"{c} channels cannot be divided by {block * block}")
    shape = (block, block, c // block**2) if order[1] == 3 else (c // block**2, block, block)
    spread = x.reshape(n, *shape, h, w).transpose(order)
    return spread.reshape(n, c // block**2, h * block, w * block)


@op("depth_to_space", view=True)
def depth_to_space(call, x, block_size):
    """MIL depth_to_space: channel = (row in block, column in block, output channel)."""
    return _blocks_out(x, int(block_size), (0, 3, 4, 1, 5, 2))


@op("pixel_shuffle", view=True)
def pixel_shuffle(call, x, upscale_factor):
    """MIL pixel_shuffle: channel = (output channel, row in block, column in block)."""
    return _blocks_out(x, int(upscale_factor), (0, 1, 4, 2, 5, 3))


def _blocks_in(x, block, order):
    """x (n, C, H, W) -> (n, C·block², H / block, W / block)."""
    n, c, h, w = x.shape
    split = x.reshape(n, c, h // block, block, w // block, block).transpose(order)
    return split.reshape(n, c * block * block, h // block, w // block)


@op("space_to_depth", view=True)
def space_to_depth(call, x, block_size):
    """MIL space_to_depth: the inverse of depth_to_space."""
    return _blocks_in(x, int(block_size), (0, 3, 5, 1, 2, 4))


@op("pixel_unshuffle", view=True)
def pixel_unshuffle(call, x, downscale_factor):
    """MIL pixel_unshuffle: the inverse of pixel_shuffle."""
    return _blocks_in(x, int(downscale_factor), (0, 1, 3, 5, 2, 4))


@op("space_to_batch", view=True)
def space_to_batch(call, x, block_shape, paddings):
    """MIL space_to_batch of x (n, C, H, W): batch = (row in block, column in block, n)."""
    rows, columns = np.asarray(block_shape).tolist()
    x = np.pad(x, [(0, 0), (0, 0), *np.asarray(paddings).tolist()])
    n, c, h, w = x.shape
    split = x.reshape(n, c, h // rows, rows, w // columns, columns).transpose(3, 5, 0, 1, 2, 4)
    return split.reshape(n * rows * columns, c, h // rows, w // columns)


@op("batch_to_space", view=True)
def batch_to_space(call, x, block_shape, crops):
    """MIL batch_to_space: the inverse of space_to_batch."""
    rows, columns = np.asarray(block_shape).tolist()
    (top, bottom), (left, right) = np.asarray(crops).tolist()
    n, c, h, w = x.shape
    spread = x.reshape(rows, columns, n // (rows * columns), c, h, w).transpose(2, 3, 4, 0, 5, 1)
    whole = spread.reshape(n // (rows * columns), c, h * rows, w * columns)
    return whole[:, :, top : h * rows - bottom, left : w * columns - right]
