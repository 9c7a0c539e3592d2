"""Constants of an asset, large ones under names that their content gives.

`coreai.authoring.constant` names them by a hash that differs from process to process, and the names are in
the file: the same inputs would not make the same bytes.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np
from coreai import authoring as ca
from coreai._compiler.dialects.coreai.constant import ConstantOp
from coreai._compiler.ir import Attribute, DenseResourceElementsAttr, IntegerType, RankedTensorType, Type
from coreai.authoring import Value
from coreai.authoring.constant import constant

from ss_convert.coreai.small_integers import packed

# From so many elements on `coreai.authoring.constant` stores them apart from the operations.
LARGE = 256


class Constants:
    """Those of one asset: equal ones are stored once. Arrays are kept as they are until it is written."""

    def __init__(self) -> None:
        self._stored: dict[str, Attribute] = {}

    def array(self, values: np.ndarray) -> Value:
        """Values of a dtype that numpy and Core AI have."""
        values = np.ascontiguousarray(values).reshape(values.shape)
        if values.size < LARGE:
            return constant(values)
        return self._large(ca.TensorType(values.shape, values.dtype)._to_mlir(), values)

    def integers(self, values: np.ndarray, bits: int) -> Value:
        """int8 or uint8, each value within `bits` bits → a constant of so many bits per value."""
        make = IntegerType.get_signed if values.dtype == np.int8 else IntegerType.get_unsigned
        return self._large(RankedTensorType.get(values.shape, make(bits)), packed(values, bits))

    def _large(self, kind: Type, data: np.ndarray) -> Value:
        digest = sha256(str(kind).encode())
        digest.update(data)
        name = f"constant_{int.from_bytes(digest.digest()[:12], 'big')}"
        if name not in self._stored:
            self._stored[name] = DenseResourceElementsAttr.get_from_buffer(data, name, kind)
        return Value._from_mlir(ConstantOp(value=self._stored[name]).result)
