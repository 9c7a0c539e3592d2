"""MLX's quantized matrices: which tensors of a model are packed, how, and their values.

The values follow from the format alone, so that MLX's own kernels can be held to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ss_device.errors import UserError

# Beside the packed `.weight`; the block formats have no biases.
FACTORS = ("scales", "biases")
# OCP's microscaling formats and NVIDIA's, by weights per scale and bits per weight.
BLOCK_MODES = {(32, 4): "mxfp4", (32, 8): "mxfp8", (16, 4): "nvfp4"}
BYTES, WORDS, FLOATS = ("U8", "uint8"), ("U32", "uint32"), ("F", "BF", "bfloat", "float")
# Values that are unpacked at a time: bits take a byte each on the way.
AT_ONCE = 1 << 22


class Tensor(Protocol):
    """An array, or where one lies in a file."""

    shape: tuple[int, ...]
    dtype: object


@dataclass(frozen=True)
class Packing:
    """How one matrix is packed: weights per scale, bits per weight, MLX's name of the format."""

    group_size: int
    bits: int
    mode: str = "affine"


def packings(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], where: str = "base model"
) -> dict[str, Packing]:
    """Packed matrices among canonical tensors, by path. shapes: `Architecture.weight_shapes`.

    Group size and bits follow from the tensors' widths. Raises UserError where they do not fit.
    """
    found = {}
    for name in tensors:
        module, _, kind = name.rpartition(".")
        if kind == "scales":
            found[module] = _packing(module, tensors, shapes.get(f"{module}.weight", ()), where)
    return found


def _packing(module: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...], where: str) -> Packing:
    unfit = UserError(f"{where}: quantized '{module}' does not have the shape {shape}")
    if f"{module}.weight" not in tensors or len(shape) != 2:
        raise unfit
    rows, width = shape
    packed, scales = tensors[f"{module}.weight"].shape, tensors[f"{module}.scales"].shape
    if len(packed) != 2 or len(scales) != 2 or packed[0] != rows or scales[0] != rows or width % scales[1]:
        raise unfit
    _check_kind(tensors, f"{module}.weight", where, WORDS)
    group, bits = width // scales[1], packed[1] * 32 // width
    if f"{module}.biases" in tensors:
        if tensors[f"{module}.biases"].shape != scales or bits * width != packed[1] * 32:
            raise unfit
        for factor in FACTORS:
            _check_kind(tensors, f"{module}.{factor}", where, FLOATS)
        return Packing(group, bits)
    kind = _kind(tensors[f"{module}.scales"])
    if kind not in BYTES or (group, bits) not in BLOCK_MODES:
        raise UserError(
            f"{where}: '{module}' is quantized in a way that is not supported ({bits} bits in groups of "
            f"{group}, scales of {kind}, no biases)"
        )
    return Packing(group, bits, BLOCK_MODES[group, bits])


def _check_kind(tensors: Mapping[str, Tensor], name: str, where: str, kinds: tuple[str, ...]) -> None:
    """UserError where the number format of a tensor does not begin like one of `kinds`."""
    kind = _kind(tensors[name])
    if not kind.startswith(kinds):
        raise UserError(f"{where}: quantized '{name}' is stored as {kind}, expected {kinds[-1]}")


def _kind(tensor: Tensor) -> str:
    """The number format of a NumPy or MLX array, or of a stored tensor, by its short name."""
    return str(tensor.dtype).rpartition(".")[2]


def dequantize(
    packed: np.ndarray, scales: np.ndarray, biases: np.ndarray | None, packing: Packing
) -> np.ndarray:
    """Values float32 [rows, width] of a packed matrix.

    packed: uint32 [rows, width · bits / 32], the first value in the lowest bits; scales, biases:
    [rows, width / group size], of the block formats bytes and None.
    """
    rows, width = packed.shape[0], packed.shape[1] * 32 // packing.bits
    values = np.empty((rows, width), np.float32)
    for start in range(0, rows, step := max(1, AT_ONCE // width)):
        block = slice(start, start + step)
        codes = _codes(packed[block], packing.bits)
        values[block] = codes if packing.mode == "affine" else _element(packing)[codes.astype(np.intp)]
    grouped = values.reshape(rows, -1, packing.group_size)
    grouped *= _scale(scales, packing.mode)[..., None]
    if biases is not None:
        grouped += biases.astype(np.float32)[..., None]
    return values


def _codes(packed: np.ndarray, bits: int) -> np.ndarray:
    """The numbers in consecutive groups of `bits` bits, as float32 [rows, width]."""
    stream = np.unpackbits(packed.astype("<u4", copy=False).view(np.uint8), axis=1, bitorder="little")
    powers = np.exp2(np.arange(bits, dtype=np.float32))
    return stream.reshape(len(packed), -1, bits).astype(np.float32) @ powers


def _element(packing: Packing) -> np.ndarray:
    """Value of every code of a block format: E2M1 in four bits, E4M3 in eight."""
    return _small_floats(2, 1, 1) if packing.bits == 4 else _small_floats(4, 3, 7)


def _scale(scales: np.ndarray, mode: str) -> np.ndarray:
    """Scales in float32: numbers, powers of two by their exponent (E8M0), or E4M3."""
    if mode == "affine":
        return scales.astype(np.float32)
    if mode == "nvfp4":
        return _small_floats(4, 3, 7)[scales]
    return np.exp2(scales.astype(np.float32) - 127)


def _small_floats(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """Values of all codes of a float format: sign, exponent, mantissa; without infinities."""
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    size = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))
    return np.where(codes >> (exponent_bits + mantissa_bits), -size, size).astype(np.float32)
