"""The operations that the graphs are written in, and the dialect that they end in.

Layers, streams, tree, cache and selection are written once, with `op`. A dialect (`coreml/operations.py`:
MIL, `coreai/operations.py`: Core AI) builds each operation into the function that is being built;
`writing_in` says which. Values have a `shape`; where one stands, a numpy array may stand as a constant, of
the other operand's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import numpy as np

from ss_convert.graph.compression import Stored


class Operations(Protocol):
    """What a dialect has. Shapes are static; axes count from 0, or from the end where they are negative.

    half_only: float32 may not even stand in between.
    """

    half_only: bool

    def constant(self, value: np.ndarray, name: str):
        """A constant with a name of its own, to be used more than once."""

    def weight(self, name: str, stored: Stored, trailing: int = 0):
        """A stored weight, decompressed where it is used; `trailing` axes of size 1 behind it."""

    # Arithmetic, with the usual broadcasting. Both sides have the same dtype.
    def add(self, x, y): ...
    def sub(self, x, y): ...
    def mul(self, x, y): ...
    def real_div(self, x, y): ...
    def minimum(self, x, y): ...
    def maximum(self, x, y): ...
    def exp(self, x): ...
    def log(self, x): ...
    def tanh(self, x): ...
    def silu(self, x): ...
    def relu(self, x): ...
    def gelu(self, x, mode: str):
        """`EXACT` (by the error function) or `TANH_APPROXIMATION`."""

    # Comparisons give booleans.
    def equal(self, x, y): ...
    def greater(self, x, y): ...
    def greater_equal(self, x, y): ...
    def less(self, x, y): ...

    def to_float(self, x):
        """Anything → fp16, booleans → 0 and 1."""

    def to_int(self, x):
        """Whole numbers → int32."""

    # Shapes.
    def reshape(self, x, shape: Sequence[int]): ...
    def transpose(self, x, perm: Sequence[int]): ...
    def expand_dims(self, x, axes: Sequence[int]): ...
    def squeeze(self, x, axes: Sequence[int]): ...
    def tile(self, x, reps: Sequence[int]): ...
    def concat(self, values: Sequence, axis: int): ...
    def slice_by_size(self, x, begin: Sequence[int], size: Sequence[int]): ...
    def identity(self, x):
        """The value under another name: a function may not return its own input."""

    def gather(self, x, indices, axis: int):
        """Slices of x along `axis` at int32 indices [n]; indices must lie within x."""

    # Sums, choices and products.
    def reduce_sum(self, x, axes: Sequence[int], keep_dims: bool): ...
    def reduce_max(self, x, axes: Sequence[int], keep_dims: bool): ...
    def reduce_argmax(self, x, axis: int):
        """int32 index of the largest value along `axis`, the lowest among equals; the axis goes."""

    def softmax(self, x, axis: int): ...
    def matmul(self, x, y, transpose_y: bool = False): ...
    def linear(self, x, weight, bias=None):
        """x [n, in] times weight [out, in] plus bias [out] → [n, out]."""

    def conv(self, x, weight, bias=None):
        """The same as a 1×1 convolution: x [1, in, 1, n], weight [out, in, 1, 1] → [1, out, 1, n]."""

    def layer_norm(self, x, axis: int, gain, shift, epsilon: float):
        """(x - mean) / sqrt(variance + ε) · gain + shift over `axis`; shift None: 0."""

    def rms_gain(self, gain: np.ndarray) -> np.ndarray:
        """A gain [width] as `rms_norm` takes it."""

    def rms_norm(self, x, axis: int, gain, epsilon: float):
        """x / sqrt(mean(x²) + ε) · gain over `axis`, whatever the size of x: no square may overflow."""

    def attention(self, queries, keys, values, mask):
        """Fused: softmax(queries · keysᵀ · s + mask) · values. [g, n, d], [g, S, d] twice, [1, n, S].

        s is 1 / √d in MIL and 1 in Core AI (`attention.for_attention`).
        """

    # The state: a value that outlives the call.
    def read_state(self, state): ...
    def update_state(self, state, value, rows, begin):
        """Write `rows` into `value`, the state as it was read last, from int32 `begin` [rank] on → the new
        value, which is the state from here on."""


_dialect: ContextVar[Operations] = ContextVar("dialect")


class _Current:
    """The operations of the dialect that is being written in."""

    def __getattr__(self, name: str):
        return getattr(_dialect.get(), name)


op: Operations = _Current()


@contextmanager
def writing_in(dialect: Operations) -> Iterator[None]:
    """Within the block, `op` is this dialect."""
    token = _dialect.set(dialect)
    try:
        yield
    finally:
        _dialect.reset(token)
