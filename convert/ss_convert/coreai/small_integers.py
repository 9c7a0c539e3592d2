"""Constants of integers of 1 to 8 bits, stored without gaps.

`coreai.authoring.constant` has no type of 6 bits, and of those below 8 it stores a byte per value, which
the runtime then reads as packed values (coreai-core 1.0.0b3). Apple's exporter hands over packed bytes too
(`apple/coreai-torch`, `converter.py`).
"""

from __future__ import annotations

import numpy as np
from coreai._compiler.dialects.coreai.constant import ConstantOp, create_elements_attr
from coreai._compiler.ir import IntegerType, Location, RankedTensorType
from coreai.authoring import Value


def integers(values: np.ndarray, bits: int) -> Value:
    """int8 or uint8 of any shape, each value within `bits` bits → a constant of so many bits per value."""
    make = IntegerType.get_signed if values.dtype == np.int8 else IntegerType.get_unsigned
    kind = RankedTensorType.get(values.shape, make(bits))
    return Value._from_mlir(
        ConstantOp(value=create_elements_attr(Location.unknown(), kind, packed(values, bits))).result
    )


def packed(values: np.ndarray, bits: int) -> np.ndarray:
    """The lowest `bits` bits of every value behind one another, the lowest first: uint8 [n·bits/8]."""
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8) & np.uint8(2**bits - 1)
    # Eight values of `bits` bits are as many bytes.
    eights = np.zeros((-(-flat.size // 8), 8), np.uint8)
    eights.reshape(-1)[: flat.size] = flat
    words = np.zeros(len(eights), "<u8")
    for place in range(8):
        words |= eights[:, place].astype(np.uint64) << np.uint64(bits * place)
    return words.view(np.uint8).reshape(-1, 8)[:, :bits].reshape(-1)[: -(-flat.size * bits // 8)]
