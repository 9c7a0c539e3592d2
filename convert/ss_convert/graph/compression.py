"""Storing weights in fewer bits: per-channel int8, per-block int4, lookup tables per group of channels.

A dialect writes a compressed weight as an operation in front of its use: functions share it, and nothing
has to be compressed again when packages are merged. Everything here is deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ss_convert.graph.lookup_tables import best_values, nearest
from ss_convert.graph.weight_format import INT4_BLOCK, TABLE_GROUP, largest_divisor, table_rows


@dataclass(frozen=True)
class Quantized:
    """scale · data. data: int8 [out, in] with values of `bits` bits; scale: fp16 [out, in / block]."""

    data: np.ndarray
    scale: np.ndarray
    bits: int


@dataclass(frozen=True)
class Palettized:
    """table[group of the row][index]. indices: uint8 [out, in]; table: fp16 [groups, 2^bits]."""

    indices: np.ndarray
    table: np.ndarray
    bits: int


Stored = np.ndarray | Quantized | Palettized


def compress(weight: np.ndarray, weight_format: str) -> Stored:
    """An fp16 matrix [out, in] as `weight_format` says (`WEIGHT_FORMATS`); `fp16` leaves it as it is."""
    if weight_format == "fp16":
        return weight
    if weight_format == "int8":
        return quantize(weight, 8, weight.shape[1])
    if weight_format == "int4":
        return quantize(weight, 4, largest_divisor(weight.shape[1], INT4_BLOCK))
    return palettize(weight, int(weight_format.removeprefix("lut")), TABLE_GROUP[weight_format])


def quantize(weight: np.ndarray, bits: int, block: int) -> Quantized:
    """Symmetric, one scale for every `block` neighbours of a row: |data| ≤ 2^(bits-1) - 1."""
    out, width = weight.shape
    largest = 2 ** (bits - 1) - 1
    blocks = weight.astype(np.float32).reshape(out, width // block, block)
    scale = (np.abs(blocks).max(axis=-1) / largest).astype(np.float16)
    # A block of zeros, or of values so small that their scale is 0 in fp16, is stored as zeros.
    divisor = np.where(scale > 0, scale, np.float16(1)).astype(np.float32)[..., None]
    data = np.clip(np.rint(blocks / divisor), -largest, largest).astype(np.int8)
    return Quantized(data.reshape(out, width), scale, bits)


def palettize(weight: np.ndarray, bits: int, group: int) -> Palettized:
    """The best 2^bits values (one-dimensional k-means) for every `group` rows.

    The number of rows must be a multiple of the group; the nearest smaller divisor is taken, or one
    table for the whole matrix.
    """
    out, width = weight.shape
    groups = weight.reshape(out // table_rows(out, group), -1)
    found = [nearest(row, best_values(row, 2**bits)) for row in groups]
    indices = np.stack([indices for indices, _ in found]).reshape(out, width)
    return Palettized(indices, np.stack([table for _, table in found]), bits)


def num_rows(stored: Stored) -> int:
    """Rows [out] of a stored matrix."""
    if isinstance(stored, np.ndarray):
        return stored.shape[0]
    return (stored.data if isinstance(stored, Quantized) else stored.indices).shape[0]


def row_parts(stored: Stored, largest: int) -> list[tuple[int, Stored]]:
    """(first row, rows) of consecutive parts of at most `largest` rows, compressed as the whole is."""
    count, group = num_rows(stored), 1
    if isinstance(stored, Palettized) and stored.table.shape[0] > 1:
        group = count // stored.table.shape[0]
    step = max(group, largest // group * group)
    return [
        (start, _rows(stored, start, min(start + step, count), group)) for start in range(0, count, step)
    ]


def _rows(stored: Stored, start: int, stop: int, group: int) -> Stored:
    if isinstance(stored, np.ndarray):
        return stored[start:stop]
    if isinstance(stored, Quantized):
        return Quantized(stored.data[start:stop], stored.scale[start:stop], stored.bits)
    one_table = stored.table.shape[0] == 1
    table = stored.table if one_table else stored.table[start // group : -(-stop // group)]
    return Palettized(stored.indices[start:stop], table, stored.bits)
