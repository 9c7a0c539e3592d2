"""Padding and sliding windows shared by convolution and pooling."""

import numpy as np

from ..errors import ExecutorError


def explicit_padding(pad_type, pad, sizes, kernel, strides, dilations) -> list[tuple[int, int]]:
    """Elements added before and after each spatial axis for a MIL pad_type.

    sizes, kernel, strides, dilations: one int per spatial axis; pad: 2 per axis, "custom" only.
    """
    if pad_type == "custom":
        flat = [int(p) for p in pad] if pad is not None else [0] * 2 * len(sizes)
        return list(zip(flat[::2], flat[1::2], strict=True))
    if pad_type == "valid":
        return [(0, 0)] * len(sizes)
    if pad_type not in ("same", "same_lower"):
        raise ExecutorError(f"unknown pad_type '{pad_type}'")
    padding = []
    for size, k, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        total = max(0, (-(-size // stride) - 1) * stride + (k - 1) * dilation + 1 - size)
        small, large = total // 2, total - total // 2
        padding.append((small, large) if pad_type == "same" else (large, small))
    return padding


def pad_spatial(x: np.ndarray, padding: list[tuple[int, int]], value: float = 0.0) -> np.ndarray:
    """x (n, C, *D) with `value` around its spatial axes."""
    if not any(before or after for before, after in padding):
        return x
    return np.pad(x, [(0, 0), (0, 0), *padding], constant_values=np.float32(value))


def windows(x: np.ndarray, kernel, strides, dilations) -> np.ndarray:
    """All windows of x (n, C, *D) as a view (n, C, *D_out, *kernel)."""
    spatial = tuple(range(2, x.ndim))
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    if any(extent > x.shape[axis] for extent, axis in zip(extents, spatial, strict=True)):
        raise ExecutorError(f"the kernel {list(kernel)} is larger than the padded input")
    view = np.lib.stride_tricks.sliding_window_view(x, extents, axis=spatial)
    steps = [slice(None)] * 2 + [slice(None, None, s) for s in strides]
    steps += [slice(None, None, d) for d in dilations]
    return view[tuple(steps)]


def int_list(value, default: int, count: int) -> list[int]:
    """A parameter with one int per spatial axis, or its default."""
    return [default] * count if value is None else [int(v) for v in np.atleast_1d(value)]
