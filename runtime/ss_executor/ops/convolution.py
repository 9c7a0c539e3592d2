"""Convolutions (MIL: conv, conv_transpose) in one, two and three dimensions."""

import math

import numpy as np

from ..registry import op
from .windows import explicit_padding, int_list, pad_spatial, windows


def _add_bias(result, bias):
    if bias is not None:
        result += bias.reshape((-1,) + (1,) * (result.ndim - 2))
    return result


@op("conv")
def conv(call, x, weight, bias=None, strides=None, pad_type="valid", pad=None, dilations=None, groups=1):
    """MIL conv: x (n, C, *D), weight (O, C/groups, *K), bias (O,) -> (n, O, *D_out)."""
    count = x.ndim - 2
    kernel, groups = weight.shape[2:], int(groups)
    strides, dilations = int_list(strides, 1, count), int_list(dilations, 1, count)
    padding = explicit_padding(pad_type, pad, x.shape[2:], kernel, strides, dilations)
    x = pad_spatial(x, padding)
    n, channels, outputs = x.shape[0], x.shape[1], weight.shape[0]
    if math.prod(kernel) == 1:
        # One matrix product per image; no window has to be copied.
        x = x[(slice(None), slice(None), *(slice(None, None, s) for s in strides))]
        space = x.shape[2:]
        columns = x.reshape(n, groups, channels // groups, -1)
    else:
        view = windows(x, kernel, strides, dilations)
        space = view.shape[2 : 2 + count]
        axes = (0, 1, *range(2 + count, 2 + 2 * count), *range(2, 2 + count))
        rows = channels // groups * math.prod(kernel)
        columns = view.transpose(axes).reshape(n, groups, rows, -1)
    matrix = weight.reshape(groups, outputs // groups, -1)
    return _add_bias(np.matmul(matrix, columns).reshape(n, outputs, *space), bias)


@op("conv_transpose")
def conv_transpose(
    call, x, weight, bias=None, pad=None, output_shape=None, pad_type="valid", strides=None,
    dilations=None, groups=1,
):  # fmt: skip
    """MIL conv_transpose: x (n, C, *D), weight (C, O/groups, *K) -> (n, O, *D_out)."""
    count, groups = x.ndim - 2, int(groups)
    sizes = x.shape[2:]
    strides, dilations = int_list(strides, 1, count), int_list(dilations, 1, count)
    full = _scatter_windows(x, weight, strides, dilations, groups)
    spatial = full.shape[2:]
    if pad_type == "custom":
        begins = int_list(pad, 0, 2 * count)
        ends = [size - after for size, after in zip(spatial, begins[1::2], strict=True)]
        begins = begins[::2]
    elif pad_type == "valid":
        begins, ends = [0] * count, list(spatial)
    else:
        wanted = [size * stride for size, stride in zip(sizes, strides, strict=True)]
        extra = [max(0, have - want) for have, want in zip(spatial, wanted, strict=True)]
        begins = [(e + (pad_type == "same_lower")) // 2 for e in extra]
        ends = [begin + want for begin, want in zip(begins, wanted, strict=True)]
    if output_shape is not None:
        wanted = [int(size) for size in np.asarray(output_shape)[-count:]]
        ends = [begin + want for begin, want in zip(begins, wanted, strict=True)]
    # A declared shape may reach beyond the last window; nothing was added there.
    over = [(0, max(0, end - size)) for end, size in zip(ends, spatial, strict=True)]
    full = pad_spatial(full, over)
    cut = tuple(slice(b, e) for b, e in zip(begins, ends, strict=True))
    return _add_bias(np.ascontiguousarray(full[(slice(None), slice(None), *cut)]), bias)


def _scatter_windows(x, weight, strides, dilations, groups) -> np.ndarray:
    """Every input element times the kernel, added up at its place, without any cropping."""
    n, channels, *sizes = x.shape
    outputs, kernel = weight.shape[1], weight.shape[2:]
    full = [
        (size - 1) * s + (k - 1) * d + 1
        for size, s, k, d in zip(sizes, strides, kernel, dilations, strict=True)
    ]
    result = np.zeros((n, groups * outputs, *full), np.float32)
    columns = x.reshape(n, groups, channels // groups, -1)
    for position in np.ndindex(*kernel):
        taps = weight[(slice(None), slice(None), *position)]
        taps = taps.reshape(groups, channels // groups, outputs).swapaxes(1, 2)
        part = np.matmul(taps, columns).reshape(n, groups * outputs, *sizes)
        place = tuple(
            slice(p * d, p * d + (size - 1) * s + 1, s)
            for p, d, size, s in zip(position, dilations, sizes, strides, strict=True)
        )
        result[(slice(None), slice(None), *place)] += part
    return result
