"""Compressed constants and integer quantisation (MIL: constexpr_*, quantize, dequantize)."""

import math

import numpy as np

from ..dtypes import unpack_bits
from ..errors import ExecutorError
from ..registry import op


def _along(parameter, rank: int, axis) -> np.ndarray:
    """A scalar or a vector that runs along `axis`, shaped to broadcast against `rank` axes."""
    parameter = np.asarray(parameter, np.float32)
    if parameter.ndim == 0:
        return parameter
    shape = [1] * rank
    shape[int(axis)] = -1
    return parameter.reshape(shape)


def _affine(data, scale, zero_point, axis):
    data = data.astype(np.float32)
    if zero_point is not None:
        data = data - _along(zero_point, data.ndim, axis)
    return _along(scale, data.ndim, axis) * data


@op("constexpr_affine_dequantize")
def constexpr_affine_dequantize(call, quantized_data, zero_point, scale, axis):
    """iOS 16: scale · (quantized_data − zero_point), scalars or vectors along `axis`."""
    return _affine(quantized_data, scale, zero_point, axis)


@op("dequantize")
def dequantize(call, input, scale, zero_point=None, axis=0):
    """MIL dequantize: scale · (input − zero_point)."""
    return _affine(input, scale, zero_point, axis)


@op("quantize")
def quantize(call, input, scale, output_dtype, zero_point=None, axis=0):
    """MIL quantize: clip(round(input / scale) + zero_point) to the range of the type."""
    values = np.rint(input / _along(scale, input.ndim, axis))
    if zero_point is not None:
        values = values + _along(zero_point, input.ndim, axis)
    limits = np.iinfo(output_dtype)
    return np.clip(values, limits.min, limits.max)


@op("constexpr_cast", exact=True)
def constexpr_cast(call, source_val, output_dtype):
    """A constant in another float type."""
    return source_val


def _expanded(parameter: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Repeat each block parameter over its block, so that it broadcasts against `shape`."""
    for axis, (size, want) in enumerate(zip(parameter.shape, shape, strict=True)):
        if want % size:
            raise ExecutorError(f"{size} blocks do not divide axis {axis} of size {want}")
        if 1 < size < want:
            parameter = np.repeat(parameter, want // size, axis)
    return parameter


@op("constexpr_blockwise_shift_scale")
def constexpr_blockwise_shift_scale(call, data, scale, offset=None):
    """iOS 18: scale · (data − offset), where scale and offset have one entry per block."""
    values = data.astype(np.float32)
    if offset is not None:
        values -= _expanded(offset.astype(np.float32), data.shape)
    values *= _expanded(scale, data.shape)
    return values


@op("constexpr_lut_to_dense")
def constexpr_lut_to_dense(call, indices, lut, shape=None, vector_axis=None):
    """Lookup tables. iOS 16: packed indices, `shape`, one table; iOS 18: tables per block.

    iOS 18: indices (d0, ..), lut (t0, .., palettes, vector) with t_i dividing d_i.
    """
    if shape is not None:
        sizes = tuple(np.atleast_1d(shape).tolist())
        bits = int(math.log2(lut.size))
        return lut[unpack_bits(indices, bits, math.prod(sizes))].reshape(sizes)
    return _lookup(indices, lut, vector_axis)


def _lookup(indices, lut, vector_axis) -> np.ndarray:
    tables = lut.shape[: indices.ndim]
    palettes, vector = lut.shape[-2:]
    flat = lut.reshape(-1, vector)
    first = np.arange(math.prod(tables)).reshape(tables) * palettes
    values = flat[_expanded(first, indices.shape) + indices]  # (*indices, vector)
    if vector == 1:
        return values[..., 0]
    axis = int(vector_axis) % indices.ndim
    sizes = list(indices.shape)
    sizes[axis] *= vector
    return np.moveaxis(values, -1, axis + 1).reshape(sizes)


def _dense(nonzero, mask) -> np.ndarray:
    """Values of a sparse tensor at the places where mask is set, zeros elsewhere."""
    result = np.zeros(mask.shape, nonzero.dtype)
    result[mask != 0] = nonzero
    return result


@op("constexpr_sparse_to_dense", exact=True)
def constexpr_sparse_to_dense(call, nonzero_data, mask, shape=None):
    """A dense tensor. iOS 16: packed bit mask and `shape`; iOS 18: mask of uint1."""
    if shape is not None:
        sizes = tuple(np.atleast_1d(shape).tolist())
        mask = unpack_bits(mask, 1, math.prod(sizes)).reshape(sizes)
    return _dense(nonzero_data, mask)


@op("constexpr_lut_to_sparse", exact=True)
def constexpr_lut_to_sparse(call, indices_mask, indices_nonzero_data, lut, vector_axis=None):
    """iOS 18: looks up the non-zero entries only -> mask, values."""
    dense = _lookup(_dense(indices_nonzero_data, indices_mask), lut, vector_axis)
    mask = indices_mask
    if lut.shape[-1] > 1:
        mask = np.repeat(mask, lut.shape[-1], axis=int(vector_axis))
    return mask, dense[mask != 0]


@op("constexpr_sparse_blockwise_shift_scale")
def constexpr_sparse_blockwise_shift_scale(call, data_mask, nonzero_data, scale, offset=None):
    """iOS 18: scale · (data − offset) of the non-zero entries only -> mask, values."""
    dense = constexpr_blockwise_shift_scale(call, _dense(nonzero_data, data_mask), scale, offset)
    return data_mask, dense[data_mask != 0]
