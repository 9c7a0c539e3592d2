"""Resizing of the last two axes (MIL: image_resizing)."""

import numpy as np

from ..errors import ExecutorError
from ..registry import op


def _nearest(x, height: int, width: int, row_scale: float, column_scale: float) -> np.ndarray:
    """x (*, H, W) -> (*, height, width); each output takes the element at index / scale."""
    rows = np.minimum(np.floor(np.arange(height) / row_scale), x.shape[-2] - 1).astype(int)
    columns = np.minimum(np.floor(np.arange(width) / column_scale), x.shape[-1] - 1).astype(int)
    return x[..., rows[:, None], columns[None, :]]


@op("upsample_nearest_neighbor", exact=True)
def upsample_nearest_neighbor(call, x, scale_factor_height=1, scale_factor_width=1):
    """MIL upsample_nearest_neighbor by integer or fractional factors."""
    tall, wide = float(scale_factor_height), float(scale_factor_width)
    return _nearest(x, int(x.shape[-2] * tall), int(x.shape[-1] * wide), tall, wide)


@op("resize_nearest_neighbor", exact=True)
def resize_nearest_neighbor(call, x, target_size_height, target_size_width):
    """MIL resize_nearest_neighbor to a given size."""
    height, width = int(target_size_height), int(target_size_width)
    return _nearest(x, height, width, height / x.shape[-2], width / x.shape[-1])


def _strict_corners(size, target):
    return np.arange(target) * ((size - 1) / (target - 1) if target > 1 else 0.0)


def _corners(size, target):
    return np.array([(size - 1) / 2]) if target == 1 else _strict_corners(size, target)


def _default(size, target):
    return np.arange(target) * (size / target)


def _offset_corners(size, target):
    delta = max(1, size - 1) / target
    return 0.5 * delta + np.arange(target) * delta


def _unaligned(size, target):
    spacing = size / target
    return np.arange(target) * spacing + 0.5 * spacing - 0.5


_GRIDS = {
    "STRICT_ALIGN_CORNERS": _strict_corners,
    "ALIGN_CORNERS": _corners,
    "DEFAULT": _default,
    "OFFSET_CORNERS": _offset_corners,
    "UNALIGN_CORNERS": _unaligned,
}


def _interpolated(x, axis: int, points: np.ndarray) -> np.ndarray:
    """Linear interpolation of x along `axis` at grid points, clamped to the grid."""
    size = x.shape[axis]
    points = np.clip(points, 0, size - 1)
    low = np.floor(points).astype(int)
    share = (points - low).astype(np.float32)
    share = share.reshape((-1,) + (1,) * (-1 - axis))
    lower, upper = np.take(x, low, axis), np.take(x, np.minimum(low + 1, size - 1), axis)
    return lower * (np.float32(1) - share) + upper * share


def _bilinear(x, height, width, mode):
    if mode not in _GRIDS:
        raise ExecutorError(f"unknown sampling mode '{mode}'")
    grid = _GRIDS[mode]
    tall = _interpolated(x, -2, grid(x.shape[-2], height))
    return _interpolated(tall, -1, grid(x.shape[-1], width))


@op("resize_bilinear")
def resize_bilinear(call, x, target_size_height=1, target_size_width=1, sampling_mode="DEFAULT"):
    """MIL resize_bilinear to a given size in its five sampling modes."""
    return _bilinear(x, int(target_size_height), int(target_size_width), sampling_mode)


@op("upsample_bilinear")
def upsample_bilinear(
    call, x, scale_factor_height=1, scale_factor_width=1, align_corners=True,
    half_pixel_centers=None,
):  # fmt: skip
    """MIL upsample_bilinear; the spacing comes from the sizes, not from the factors."""
    height = int(x.shape[-2] * float(scale_factor_height))
    width = int(x.shape[-1] * float(scale_factor_width))
    if bool(align_corners):
        return _bilinear(x, height, width, "STRICT_ALIGN_CORNERS")
    half = half_pixel_centers is None or bool(half_pixel_centers)
    return _bilinear(x, height, width, "UNALIGN_CORNERS" if half else "DEFAULT")
