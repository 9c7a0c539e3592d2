"""The state: reading a layer's keys and values, committing scratch rows, writing new rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ss_convert.graph.interface import STATE
from ss_convert.graph.operations import op
from ss_convert.graph.options import GraphOptions
from ss_convert.graph.parts import Part
from ss_convert.graph.tree import one_hot
from ss_device.architecture import Architecture


@dataclass(frozen=True)
class Past:
    """Keys and values [n_kv, C, head_dim] of a layer's committed slots."""

    keys: object
    values: object

    def followed_by(self, keys, values) -> tuple:
        """With new ones [n_kv, n, head_dim] behind them → keys and values [n_kv, C + n, head_dim]."""
        return op.concat([self.keys, keys], axis=1), op.concat([self.values, values], axis=1)


class Cache:
    """`kv_cache` inside a function. Reads see what was written before them.

    state: the function's state argument, fp16 [2·L, n_kv, slots, head_dim] of the L layers of `part`;
    context C.
    """

    def __init__(
        self, state, architecture: Architecture, part: Part, context: int, commit: str = "one-hot"
    ) -> None:
        self._state = state
        self._value = op.read_state(state)
        self._part = part
        self._context, self._head_dim = context, architecture.head_dim
        self._move = _gathered if commit == "gather" else _selected

    def prefix(self, layer: int) -> Past:
        """What a layer's rows see before their own."""
        index = layer - self._part.first
        return Past(self._slots(index), self._slots(len(self._part.layers) + index))

    def _slots(self, index: int):
        size = [1, self._value.shape[1], self._context, self._head_dim]
        rows = op.slice_by_size(self._value, begin=[index, 0, 0, 0], size=size)
        return op.squeeze(rows, axes=[0])

    def write(self, rows, position) -> None:
        """Write rows [2·L, n_kv, n, head_dim] to slots `position` (int32 [1]) and following."""
        if (missing := self._value.shape[3] - rows.shape[3]) > 0:
            zeros = np.zeros((*rows.shape[:3], missing), np.float16)
            rows = op.concat([rows, zeros], axis=3)
        begin = op.concat([np.zeros(2, np.int32), position, np.zeros(1, np.int32)], axis=0)
        self._value = op.update_state(self._state, self._value, rows, begin)

    def write_scratch(self, rows) -> None:
        """Write rows [2·L, n_kv, N, head_dim] behind the context."""
        self.write(rows, np.array([self._context], np.int32))

    def outputs(self) -> dict:
        """What goes out of the function besides the state."""
        return {}

    def commit(self, position, nodes, kept_rows, first_msa_layer: int) -> None:
        """Move the accepted rows of the previous step from scratch to `position` and following.

        nodes, kept_rows: int32 [N], the accepted path in the rows of the lower and of the upper layers,
        -1 behind it (docs/method.md, Pruning); None where the part has no such layers.
        kept_rows None: all layers take `nodes`. Nothing visible lies in the slots behind the path.
        """
        rows = kept_rows if nodes is None else nodes
        count, (planes, groups, _, d) = rows.shape[0], self._value.shape
        scratch = op.slice_by_size(
            self._value, begin=[0, 0, self._context, 0], size=[planes, groups, count, d]
        )
        moved = self._move(scratch, rows)
        if nodes is not None and kept_rows is not None:
            layers = self._part.first + np.arange(planes) % len(self._part.layers)
            is_upper = layers >= first_msa_layer
            is_upper = is_upper.astype(np.float16).reshape(-1, 1, 1, 1)
            lower = op.mul(moved, 1 - is_upper)
            moved = op.add(lower, op.mul(self._move(scratch, kept_rows), is_upper))
        self.write(moved, position)


class GivenCache:
    """The same for a cache that is an input: new rows go out, and the host commits them.

    given: fp16 [2·L, n_kv, C, head_dim].
    """

    def __init__(self, given, part: Part) -> None:
        self._given, self._part = given, part
        self._rows = None

    def prefix(self, layer: int) -> Past:
        """What a layer's rows see before their own."""
        index = layer - self._part.first
        return Past(self._plane(index), self._plane(len(self._part.layers) + index))

    def _plane(self, index: int):
        size = [1, *self._given.shape[1:]]
        return op.squeeze(op.slice_by_size(self._given, begin=[index, 0, 0, 0], size=size), axes=[0])

    def write(self, rows, position) -> None:
        """New rows [2·L, n_kv, n, head_dim]; the host knows their slots."""
        self._rows = rows

    def write_scratch(self, rows) -> None:
        self._rows = rows

    def commit(self, *unused) -> None:
        """The host has done it."""

    def outputs(self) -> dict:
        return {"rows": self._rows}


def open_cache(inputs: dict, architecture: Architecture, part: Part, options: GraphOptions):
    """The cache of a function, as its options have it."""
    if options.cache == "inputs":
        return GivenCache(inputs[STATE], part)
    return Cache(inputs[STATE], architecture, part, options.context, options.commit)


def _selected(rows, indices):
    """Rows [planes, n_kv, n, d] in the order of int32 [n] by one product; zeros where an index is -1."""
    count = indices.shape[0]
    return op.matmul(op.reshape(one_hot(indices, count), shape=[1, 1, count, count]), rows)


def _gathered(rows, indices):
    """The same by a gather; row 0 where an index is -1."""
    return op.gather(rows, indices=op.maximum(indices, np.int32(0)), axis=2)


def stack_rows(keys_values: list[tuple], count: int):
    """Each layer's keys and values [n_kv, n ≤ count, head_dim] → [2·L, n_kv, count, head_dim]."""
    in_order = [keys for keys, _ in keys_values] + [values for _, values in keys_values]
    planes = [op.expand_dims(_pad_rows(rows, count), axes=[0]) for rows in in_order]
    return op.concat(planes, axis=0)


def _pad_rows(rows, count: int):
    groups, n, d = rows.shape
    if n == count:
        return rows
    return op.concat([rows, np.zeros((groups, count - n, d), np.float16)], axis=1)
