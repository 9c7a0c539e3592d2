"""Weight formats of a package by name, and the bytes that weights take in them."""

from __future__ import annotations

import math

WEIGHT_FORMATS = ("fp16", "int8", "int4", "lut4", "lut6")
TABLES = ("embed.weight", "head.weight")
INT4_BLOCK = 32
TABLE_GROUP = {"lut4": 8, "lut6": 16}
# Fewer channels than this per table cost more than they gain.
SMALLEST_GROUP = 4


def weight_format_of(name: str, shape: tuple[int, ...], formats: tuple[str, str]) -> str:
    """How a weight is stored when `formats` are those of the layers' matrices and of embedding and head."""
    if name == "positions.weight" or len(shape) != 2:
        return "fp16"
    return formats[name in TABLES]


def stored_bytes(shape: tuple[int, ...], weight_format: str) -> int:
    """Bytes that `compress` leaves of an fp16 array of this shape."""
    size = math.prod(shape)
    if weight_format == "fp16":
        return 2 * size
    out, width = shape
    if weight_format.startswith("int"):
        block = width if weight_format == "int8" else largest_divisor(width, INT4_BLOCK)
        return size * int(weight_format.removeprefix("int")) // 8 + 2 * out * (width // block)
    bits, group = int(weight_format.removeprefix("lut")), table_rows(out, TABLE_GROUP[weight_format])
    return -(-size * bits // 8) + 2 * 2**bits * (out // group)


def table_rows(out: int, group: int) -> int:
    """Rows that share a table: the largest divisor of `out` up to `group`, or all where it is too small."""
    group = largest_divisor(out, group)
    return out if group < SMALLEST_GROUP else group


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` up to `limit`."""
    return next(d for d in range(min(limit, number), 0, -1) if number % d == 0)
