"""Element types: their numbers in the file, their width, and how the executor holds them."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ElementType:
    """name as in MIL text, width in bits, numpy type in the file (sub-byte: after unpacking)."""

    name: str
    bits: int
    file_dtype: np.dtype

    @property
    def storage(self) -> np.dtype:
        """Type of the arrays the executor works on; fp16 values live in float32 arrays."""
        return np.dtype(np.float32) if self.name == "float16" else self.file_dtype


def _table(*rows: tuple[int, str, int, type]) -> dict[int, ElementType]:
    return {number: ElementType(name, bits, np.dtype(kind)) for number, name, bits, kind in rows}


# MIL.proto, enum DataType. Strings have no array form here; they are Python str.
BY_NUMBER = _table(
    (1, "bool", 8, np.bool_),
    (10, "float16", 16, np.float16),
    (11, "float32", 32, np.float32),
    (12, "float64", 64, np.float64),
    (21, "int8", 8, np.int8),
    (22, "int16", 16, np.int16),
    (23, "int32", 32, np.int32),
    (24, "int64", 64, np.int64),
    (25, "int4", 4, np.int8),
    (31, "uint8", 8, np.uint8),
    (32, "uint16", 16, np.uint16),
    (33, "uint32", 32, np.uint32),
    (34, "uint64", 64, np.uint64),
    (35, "uint4", 4, np.uint8),
    (36, "uint2", 2, np.uint8),
    (37, "uint1", 1, np.uint8),
    (38, "uint6", 6, np.uint8),
    (39, "uint3", 3, np.uint8),
)
BY_NAME = {element.name: element for element in BY_NUMBER.values()}

_HALF_MAX_TIE = np.float32(65520.0)  # from here on, rounding to nearest gives infinity
_HALF_MIN_NORMAL = np.float32(2.0**-14)


def round_to_half(x: np.ndarray) -> np.ndarray:
    """Round float32 values to the nearest fp16 value (ties to even), kept in a new float32 array.

    Same result as `x.astype(float16).astype(float32)`, but an order of magnitude faster, because
    numpy converts half precision one element at a time.
    """
    x = np.asarray(x, np.float32)
    bits = x.view(np.uint32)
    rounded = np.asarray(bits >> np.uint32(13))
    rounded &= np.uint32(1)
    rounded += np.uint32(0xFFF)
    rounded += bits
    rounded &= np.uint32(0xFFFFE000)
    result = rounded.view(np.float32)
    magnitude = np.asarray(np.abs(x))
    tiny = magnitude < _HALF_MIN_NORMAL
    tiny &= magnitude > 0
    if tiny.any():
        # In [0.5, 1) float32 steps by 2^-24, exactly the step of fp16 subnormals.
        steps = (magnitude[tiny] + np.float32(0.5)) - np.float32(0.5)
        result[tiny] = np.copysign(steps, x[tiny])
    if magnitude.size and not magnitude.max() < _HALF_MAX_TIE:  # also true for not-a-number
        np.copyto(result, np.copysign(np.float32(np.inf), x), where=magnitude >= _HALF_MAX_TIE)
        np.copyto(result, np.float32(np.nan), where=np.isnan(x))
    return result


def unpack_bits(packed: np.ndarray, bits: int, count: int, signed: bool = False) -> np.ndarray:
    """Unpack `count` integers of `bits` bits, least significant bit first.

    packed: uint8 (M,) with M = ceil(bits * count / 8) -> uint8, or int8 if signed, (count,).
    """
    if bits == 8:
        values = packed[:count]
    else:
        # Three bytes hold a whole number of elements for every width that does not divide 8.
        width = 1 if 8 % bits == 0 else 3
        padded = np.zeros(-(-packed.size // width) * width, np.uint8)
        padded[: packed.size] = packed
        words = np.zeros(padded.size // width, np.uint8 if width == 1 else np.uint32)
        for i in range(width):
            words |= padded[i::width].astype(words.dtype) << words.dtype.type(8 * i)
        shifts = np.arange(0, 8 * width, bits, dtype=words.dtype)
        mask = words.dtype.type(2**bits - 1)
        values = ((words[:, None] >> shifts) & mask).astype(np.uint8).reshape(-1)[:count]
    if signed:
        shift = np.int8(8 - bits)
        values = (values << np.uint8(shift)).view(np.int8) >> shift
    return values
