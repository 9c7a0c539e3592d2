"""The graphs' operations in Core AI's dialect, through `coreai.authoring`.

Numbers are float16, but in norms. Axes and shapes are constants of the graph there; reductions and
argmax keep their axis, so it is taken off here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from coreai import authoring as ca
from coreai.authoring import Value
from coreai.authoring.constant import constant as ca_constant

from ss_convert.coreai.composites import Composites
from ss_convert.coreai.small_integers import integers
from ss_convert.coreai.tensor import Tensor
from ss_convert.graph.compression import Palettized, Quantized, Stored
from ss_convert.graph.interface import MASKED

UNSIGNED_AXES = np.uint32
# Below a half-precision maximum of a row this stands for it: a row of zeros has norm zero.
SMALLEST = 2.0**-14


def _binary(build: Callable) -> Callable:
    """A method of two operands with broadcasting, a numpy operand in the dtype of the other one."""

    def operation(self, x, y) -> Tensor:
        x, y = self._together(x, y)
        return Tensor(build(x.value, y.value))

    return operation


def _unary(build: Callable) -> Callable:
    def operation(self, x: Tensor) -> Tensor:
        return Tensor(build(x.value))

    return operation


class CoreAIOperations:
    """`graph.operations.Operations` for the functions of one asset.

    half_only: nothing may be float32 in between (Apple's Neural Engine), else norms are computed in
    float32; composites: where fused operations are declared.
    """

    def __init__(self, composites: Composites, half_only: bool = False) -> None:
        self.composites = composites
        self.half_only = half_only

    add, sub, mul = map(_binary, (ca.broadcasting_add, ca.broadcasting_sub, ca.broadcasting_mul))
    real_div = _binary(ca.broadcasting_divide)
    minimum, maximum = map(_binary, (ca.broadcasting_minimum, ca.broadcasting_maximum))
    equal, greater = map(_binary, (ca.broadcasting_equal, ca.broadcasting_greater))
    exp, log, tanh, relu = map(_unary, (ca.exp, ca.log, ca.tanh, ca.relu))

    def constant(self, value: np.ndarray, name: str) -> Tensor:
        return self._constant(value)

    def weight(self, name: str, stored: Stored, trailing: int = 0) -> Tensor:
        """fp16 as a constant; fewer bits with the dialect's decompression, whose result is fp16."""
        ones = (1,) * trailing
        if isinstance(stored, np.ndarray):
            return self._constant(stored.reshape(stored.shape + ones))
        decompress = _dequantized if isinstance(stored, Quantized) else _looked_up
        return self.to_float(Tensor(decompress(stored, ones)))

    def less(self, x, y) -> Tensor:
        return self.greater(y, x)

    def greater_equal(self, x, y) -> Tensor:
        """Not the opposite of `less`: a NaN denies both."""
        return Tensor(ca.or_(self.greater(x, y).value, self.equal(x, y).value))

    def silu(self, x: Tensor) -> Tensor:
        # The fused form was reported to compute in float32.
        return self.mul(x, Tensor(ca.sigmoid(x.value))) if self.half_only else Tensor(ca.silu(x.value))

    def gelu(self, x: Tensor, mode: str) -> Tensor:
        return Tensor(ca.gelu(x.value, approximate="none" if mode == "EXACT" else "tanh"))

    def to_float(self, x: Tensor) -> Tensor:
        return self._cast(x, np.float16)

    def to_int(self, x: Tensor) -> Tensor:
        return self._cast(x, np.int32)

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        shape = list(shape)
        if -1 in shape:
            known = int(np.prod([size for size in shape if size != -1]))
            shape[shape.index(-1)] = int(np.prod(x.shape)) // known
        return Tensor(ca.reshape(x.value, np.array(shape, UNSIGNED_AXES)))

    def transpose(self, x: Tensor, perm: Sequence[int]) -> Tensor:
        return Tensor(ca.transpose(x.value, np.array(perm, UNSIGNED_AXES)))

    def expand_dims(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        shape = list(x.shape)
        for axis in axes:
            shape.insert(axis, 1)
        return self.reshape(x, shape)

    def squeeze(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        gone = {axis % len(x.shape) for axis in axes}
        return self.reshape(x, [size for axis, size in enumerate(x.shape) if axis not in gone])

    def tile(self, x: Tensor, reps: Sequence[int]) -> Tensor:
        return Tensor(ca.tile(x.value, np.array(reps, UNSIGNED_AXES)))

    def concat(self, values: Sequence, axis: int) -> Tensor:
        dtype = next((v.dtype for v in values if isinstance(v, Tensor)), values[0].dtype)
        parts = [self._tensor(value, dtype) for value in values]
        return Tensor(ca.concat(np.int32(axis % len(parts[0].shape)), [part.value for part in parts]))

    def slice_by_size(self, x: Tensor, begin: Sequence[int], size: Sequence[int]) -> Tensor:
        first = np.array(begin, np.int32)
        return Tensor(ca.slice_(x.value, first, first + np.array(size, np.int32), np.ones_like(first)))

    def identity(self, x: Tensor) -> Tensor:
        # Of all numbers, -0 alone changes none, -0 included.
        return self.add(x, -np.zeros(1))

    def gather(self, x, indices: Tensor, axis: int) -> Tensor:
        x = x if isinstance(x, Tensor) else self._constant(x, x.dtype)
        perm = [axis, *(other for other in range(len(x.shape)) if other != axis)]
        moved = self.transpose(x, perm) if axis else x
        found = Tensor(ca.gather_nd(moved.value, self.expand_dims(indices, [1]).value))
        return self.transpose(found, np.argsort(perm)) if axis else found

    def reduce_sum(self, x: Tensor, axes: Sequence[int], keep_dims: bool) -> Tensor:
        return self._reduced(ca.reduce_sum, x, axes, keep_dims)

    def reduce_max(self, x: Tensor, axes: Sequence[int], keep_dims: bool) -> Tensor:
        return self._reduced(ca.reduce_max, x, axes, keep_dims)

    def reduce_argmax(self, x: Tensor, axis: int) -> Tensor:
        found = Tensor(ca.argmax(x.value, np.int32(axis % len(x.shape))))
        return self.squeeze(self.to_int(found), [axis])

    def softmax(self, x: Tensor, axis: int) -> Tensor:
        return Tensor(ca.softmax(x.value, np.int32(axis % len(x.shape))))

    def matmul(self, x, y, transpose_y: bool = False) -> Tensor:
        x, y = self._together(x, y)
        if transpose_y:
            axes = list(range(len(y.shape)))
            y = self.transpose(y, [*axes[:-2], axes[-1], axes[-2]])
        return Tensor(ca.broadcasting_batch_matmul(x.value, y.value))

    def linear(self, x: Tensor, weight: Tensor, bias=None) -> Tensor:
        out = self.matmul(x, weight, transpose_y=True)
        return out if bias is None else self.add(out, bias)

    def conv(self, x: Tensor, weight: Tensor, bias=None) -> Tensor:
        ones = np.ones(2, UNSIGNED_AXES)
        out = Tensor(ca.conv2d(x.value, weight.value, ones, ones, np.uint32(1)))
        if bias is None:
            return out
        return self.add(out, self.reshape(self._tensor(bias, np.float16), [1, -1, 1, 1]))

    def layer_norm(self, x: Tensor, axis: int, gain, shift, epsilon: float) -> Tensor:
        wide = self._wide(x)
        centred = self.sub(wide, self._reduced(ca.reduce_mean, wide, [axis], True))
        out = self.mul(self._over_rms(centred, axis, epsilon), self._along(gain, x, axis))
        return out if shift is None else self.add(out, self._along(shift, x, axis))

    def rms_gain(self, gain: np.ndarray) -> np.ndarray:
        return gain

    def rms_norm(self, x: Tensor, axis: int, gain, epsilon: float) -> Tensor:
        return self.mul(self._over_rms(self._wide(x), axis, epsilon), self._along(gain, x, axis))

    def attention(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Apple's composite `scaled_dot_product_attention`: a batch of one, and a mask of what is seen.

        Its scale is 1: that of the queries is in their rotary tables, where it is not rounded.
        """
        operands = {
            "query": self.expand_dims(queries, [0]),
            "key": self.expand_dims(keys, [0]),
            "value": self.expand_dims(values, [0]),
            "attn_mask": self.expand_dims(self.greater(mask, np.array(MASKED / 2)), [0]),
        }
        attributes = {"is_causal": "false", "scale": "1.0 : f32", "window_size": "0 : si64"}
        found = self.composites.call(
            "scaled_dot_product_attention", attributes, operands, self._explicit_attention
        )
        return self.squeeze(Tensor(found), [0])

    def _explicit_attention(self, queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        scores = self.matmul(queries, keys, transpose_y=True)
        hidden = self.to_float(Tensor(ca.not_(seen.value)))
        scores = self.add(scores, self.mul(hidden, np.array(MASKED)))
        return self.matmul(self.softmax(scores, -1), values)

    def read_state(self, state: list[Tensor]) -> Tensor:
        return state[-1]

    def update_state(self, state: list[Tensor], value: Tensor, rows: Tensor, begin) -> Tensor:
        """state: the values that it had in the function so far, the last one being what the call leaves."""
        begin = self._tensor(begin, np.int32)
        end = self.add(begin, np.array(rows.shape, np.int32))
        steps = np.ones(len(rows.shape), np.int32)
        written = ca.slice_update(value.value, begin.value, end.value, steps, rows.value)
        state.append(Tensor(written))
        return state[-1]

    def _constant(self, value: np.ndarray, dtype: type | None = None) -> Tensor:
        value = np.asarray(value)
        if dtype is None:
            dtype = np.float16 if np.issubdtype(value.dtype, np.floating) else value.dtype
        return Tensor(ca_constant(np.ascontiguousarray(value.astype(dtype)).reshape(value.shape)))

    def _tensor(self, value, dtype: type) -> Tensor:
        return value if isinstance(value, Tensor) else self._constant(value, dtype)

    def _together(self, x, y) -> tuple[Tensor, Tensor]:
        """Both as tensors; a constant takes the dtype of the other one."""
        if not isinstance(x, Tensor) and not isinstance(y, Tensor):
            raise TypeError("one of two operands must be a value of the graph")
        dtype = x.dtype if isinstance(x, Tensor) else y.dtype
        return self._tensor(x, dtype), self._tensor(y, dtype)

    def _cast(self, x: Tensor, dtype: type) -> Tensor:
        return x if x.dtype is dtype else Tensor(ca.cast(x.value, dtype))

    def _wide(self, x: Tensor) -> Tensor:
        """float32, where it may be used."""
        return x if self.half_only else self._cast(x, np.float32)

    def _over_rms(self, x: Tensor, axis: int, epsilon: float) -> Tensor:
        """x / sqrt(mean(x²) + ε) in the graph's dtype."""
        if self.half_only:
            return self._over_rms_in_half(x, axis, epsilon)
        mean = self._reduced(ca.reduce_mean, self.mul(x, x), [axis], True)
        inverse = Tensor(ca.rsqrt(self.add(mean, np.float32(epsilon)).value))
        return self.to_float(self.mul(x, inverse))

    def _over_rms_in_half(self, x: Tensor, axis: int, epsilon: float) -> Tensor:
        """The same over values divided by the row's largest, so that no square overflows."""
        largest = self.reduce_max(self.maximum(x, self.mul(x, np.array(-1.0))), [axis], True)
        largest = self.maximum(largest, np.array(SMALLEST))
        scaled = self.real_div(x, largest)
        mean = self._reduced(ca.reduce_mean, self.mul(scaled, scaled), [axis], True)
        # ε over the square of what was divided by, as a square itself: ε alone is a subnormal number.
        left = self.real_div(np.array(epsilon**0.5), largest)
        return self.mul(scaled, Tensor(ca.rsqrt(self.add(mean, self.mul(left, left)).value)))

    def _along(self, vector, x: Tensor, axis: int) -> Tensor:
        """A vector [width] as it is multiplied with x along `axis`."""
        vector = self._tensor(vector, np.float16)
        behind = len(x.shape) - 1 - axis % len(x.shape)
        return self.reshape(vector, [vector.shape[0], *(1,) * behind]) if behind else vector

    def _reduced(self, reduce: Callable, x: Tensor, axes: Sequence[int], keep_dims: bool) -> Tensor:
        axes = [axis % len(x.shape) for axis in axes]
        out = Tensor(reduce(x.value, np.array(axes, np.int32)))
        return out if keep_dims else self.squeeze(out, axes)


def _dequantized(stored: Quantized, ones: tuple[int, ...]) -> Value:
    """scale · data in fp16."""
    scale = stored.scale.reshape(stored.scale.shape + ones)
    data = integers(stored.data.reshape(stored.data.shape + ones), stored.bits)
    nothing = integers(np.zeros(scale.shape, np.int8), stored.bits)
    return ca.blockwise_shift_scale(data, scale, nothing, np.zeros_like(scale))


def _looked_up(stored: Palettized, ones: tuple[int, ...]) -> Value:
    """table[group of the row][index] in fp16."""
    groups, palettes = stored.table.shape
    indices = integers(stored.indices.reshape(stored.indices.shape + ones), stored.bits)
    table = stored.table.reshape(groups, 1, *ones, palettes, 1)
    return ca.lut_to_dense(indices, table, np.int16(0))
