"""Pooling (MIL: avg_pool, max_pool, l2_pool): x (n, C, *D) -> (n, C, *D_out)."""

import numpy as np

from ..registry import op
from .windows import explicit_padding, int_list, pad_spatial, windows


def _geometry(x, kernel_sizes, strides, pad_type, pad, ceil_mode):
    """Kernel, strides, padding, and the extra elements at the end that ceil_mode asks for."""
    count = x.ndim - 2
    kernel = int_list(kernel_sizes, 1, count)
    strides = int_list(strides, 1, count)
    padding = explicit_padding(pad_type, pad, x.shape[2:], kernel, strides, [1] * count)
    extra = [0] * count
    if bool(ceil_mode):
        for axis, (k, s, (before, after)) in enumerate(zip(kernel, strides, padding, strict=True)):
            padded = x.shape[2 + axis] + before + after
            outputs = -(-(padded - k) // s) + 1
            if (outputs - 1) * s >= x.shape[2 + axis] + before and before + after > 0:
                outputs -= 1
            extra[axis] = max(0, (outputs - 1) * s + k - padded)
    return kernel, strides, padding, extra


def _windows(x, geometry, value):
    """Windows (n, C, *D_out, *K) of x padded with `value`."""
    kernel, strides, padding, extra = geometry
    around = [(before, after + more) for (before, after), more in zip(padding, extra, strict=True)]
    return windows(pad_spatial(x, around, value), kernel, strides, [1] * len(kernel))


def _window_axes(x):
    return tuple(range(x.ndim, 2 * x.ndim - 2))


@op("max_pool")
def max_pool(call, x, kernel_sizes, strides=None, pad_type="valid", pad=None, ceil_mode=False):
    """MIL max_pool; padding never wins."""
    geometry = _geometry(x, kernel_sizes, strides, pad_type, pad, ceil_mode)
    return _windows(x, geometry, -np.inf).max(axis=_window_axes(x))


@op("avg_pool")
def avg_pool(
    call, x, kernel_sizes, strides=None, pad_type="valid", pad=None,
    exclude_padding_from_average=False, ceil_mode=False,
):  # fmt: skip
    """MIL avg_pool; padding counts as zeros unless excluded, what ceil_mode adds never counts."""
    geometry = _geometry(x, kernel_sizes, strides, pad_type, pad, ceil_mode)
    kernel, strides, padding, extra = geometry
    total = _windows(x, geometry, 0.0).sum(axis=_window_axes(x))
    ones = np.ones((1, 1, *x.shape[2:]), np.float32)
    if not bool(exclude_padding_from_average):
        ones = pad_spatial(ones, padding, 1.0)
        padding = [(0, 0)] * len(kernel)
    counts = _windows(ones, (kernel, strides, padding, extra), 0.0).sum(axis=_window_axes(x))
    return total / counts


@op("l2_pool")
def l2_pool(call, x, kernel_sizes, strides=None, pad_type="valid", pad=None, ceil_mode=False):
    """MIL l2_pool: square root of the sum of squares of a window."""
    geometry = _geometry(x, kernel_sizes, strides, pad_type, pad, ceil_mode)
    return np.sqrt(np.square(_windows(x, geometry, 0.0)).sum(axis=_window_axes(x)))
