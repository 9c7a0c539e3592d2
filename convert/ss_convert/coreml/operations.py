"""The graphs' operations as MIL operations of iOS 18, in fp16."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types

from ss_convert.graph.compression import Quantized, Stored


def _takes(operation: Callable, *names: str) -> Callable:
    """A method that hands its arguments to a MIL operation, the first ones by these names."""

    def build(self, *values, **options):
        return operation(**dict(zip(names, values, strict=True)), **options)

    return build


class MILOperations:
    """`graph.operations.Operations` in MIL: most are called the same there."""

    half_only = False

    add, sub, mul = (_takes(operation, "x", "y") for operation in (mb.add, mb.sub, mb.mul))
    real_div, minimum, maximum = (_takes(o, "x", "y") for o in (mb.real_div, mb.minimum, mb.maximum))
    equal, less = (_takes(operation, "x", "y") for operation in (mb.equal, mb.less))
    greater, greater_equal = (_takes(o, "x", "y") for o in (mb.greater, mb.greater_equal))
    matmul = _takes(mb.matmul, "x", "y")
    exp, log, tanh, silu = (_takes(operation, "x") for operation in (mb.exp, mb.log, mb.tanh, mb.silu))
    relu, identity, softmax = (_takes(operation, "x") for operation in (mb.relu, mb.identity, mb.softmax))
    gelu = _takes(mb.gelu, "x", "mode")
    reshape, transpose, tile = (_takes(o, "x") for o in (mb.reshape, mb.transpose, mb.tile))
    expand_dims, squeeze = (_takes(operation, "x") for operation in (mb.expand_dims, mb.squeeze))
    slice_by_size, gather = (_takes(operation, "x") for operation in (mb.slice_by_size, mb.gather))
    concat = _takes(mb.concat, "values")
    reduce_sum, reduce_max = (_takes(operation, "x") for operation in (mb.reduce_sum, mb.reduce_max))
    linear = _takes(mb.linear, "x")
    attention = _takes(mb.scaled_dot_product_attention, "query", "key", "value", "attn_mask")
    read_state = _takes(mb.read_state, "input")

    def constant(self, value: np.ndarray, name: str):
        return mb.const(val=value, name=name)

    def weight(self, name: str, stored: Stored, trailing: int = 0):
        """fp16 as a constant, fewer bits as a `constexpr_*` operation."""
        ones = (1,) * trailing
        if isinstance(stored, np.ndarray):
            return mb.const(val=stored.reshape(stored.shape + ones), name=name)
        kind = types.get_nbits_int_builtin_type(stored.bits, isinstance(stored, Quantized))
        kind = types.nptype_from_builtin(kind)
        if isinstance(stored, Quantized):
            return mb.constexpr_blockwise_shift_scale(
                data=stored.data.astype(kind).reshape(stored.data.shape + ones),
                scale=stored.scale.reshape(stored.scale.shape + ones),
                name=name,
            )
        groups, palettes = stored.table.shape
        return mb.constexpr_lut_to_dense(
            indices=stored.indices.astype(kind).reshape(stored.indices.shape + ones),
            lut=stored.table.reshape(groups, 1, *ones, palettes, 1),
            name=name,
        )

    def to_float(self, x):
        return mb.cast(x=x, dtype="fp16")

    def to_int(self, x):
        return mb.cast(x=x, dtype="int32")

    def reduce_argmax(self, x, axis: int):
        return mb.reduce_argmax(x=x, axis=axis, keep_dims=False)

    def conv(self, x, weight, bias=None):
        return mb.conv(x=x, weight=weight, bias=bias, pad_type="valid")

    def layer_norm(self, x, axis: int, gain, shift, epsilon: float):
        return mb.layer_norm(x=x, axes=[axis], gamma=gain, beta=shift, epsilon=np.float16(epsilon))

    def rms_gain(self, gain: np.ndarray) -> np.ndarray:
        return np.tile(gain, 2)

    def rms_norm(self, x, axis: int, gain, epsilon: float):
        """LayerNorm of [x, -x]: its mean is zero, and no square overflows fp16."""
        pair = mb.concat(values=[x, mb.mul(x=x, y=np.float16(-1))], axis=axis)
        normed = mb.layer_norm(x=pair, axes=[axis], gamma=gain, epsilon=np.float16(epsilon))
        return mb.slice_by_size(x=normed, begin=[0] * len(x.shape), size=x.shape)

    def update_state(self, state, value, rows, begin):
        end = mb.add(x=begin, y=np.array(rows.shape, np.int32))
        updated = mb.slice_update(x=value, update=rows, begin=begin, end=end)
        return mb.coreml_update_state(state=state, value=updated)
