"""The state: reading a layer's keys and values, committing scratch rows, writing new rows."""

from __future__ import annotations

import numpy as np
from coremltools.converters.mil import Builder as mb

from ss_convert.coreml.selection import one_hot
from ss_device.architecture import Architecture


class Cache:
    """`kv_cache` inside a function. Reads see what was written before them.

    state: the function's state argument, fp16 [2·L, n_kv, slots, head_dim]; context C.
    """

    def __init__(self, state, architecture: Architecture, context: int) -> None:
        self._state = state
        self._value = mb.read_state(input=state)
        self._layers = architecture.num_layers
        self._context = context

    def prefix(self, layer: int):
        """Keys and values [n_kv, C, head_dim] of the committed slots."""
        return self._slots(layer), self._slots(self._layers + layer)

    def _slots(self, index: int):
        _, groups, _, d = self._value.shape
        size = [1, groups, self._context, d]
        rows = mb.slice_by_size(x=self._value, begin=[index, 0, 0, 0], size=size)
        return mb.squeeze(x=rows, axes=[0])

    def write(self, rows, position) -> None:
        """Write rows [2·L, n_kv, n, head_dim] to slots `position` (int32 [1]) and following."""
        begin = mb.concat(values=[np.zeros(2, np.int32), position, np.zeros(1, np.int32)], axis=0)
        end = mb.add(x=begin, y=np.array(rows.shape, np.int32))
        updated = mb.slice_update(x=self._value, update=rows, begin=begin, end=end)
        self._value = mb.coreml_update_state(state=self._state, value=updated)

    def write_scratch(self, rows) -> None:
        """Write rows [2·L, n_kv, N, head_dim] behind the context."""
        self.write(rows, np.array([self._context], np.int32))

    def commit(self, position, nodes, kept_rows, first_msa_layer: int) -> None:
        """Move the accepted rows of the previous step from scratch to `position` and following.

        nodes, kept_rows: int32 [N], the accepted path in the rows of the lower and of the upper layers,
        -1 behind it (METHOD: One decoding step, 5). One product with one-hot rows moves all layers; the
        slots behind the path are zeroed, nothing visible lies there.
        """
        count, (planes, groups, _, d) = nodes.shape[0], self._value.shape
        selection = mb.reshape(x=one_hot(nodes, count), shape=[1, 1, count, count])
        if kept_rows is not None:
            upper = mb.reshape(x=one_hot(kept_rows, count), shape=[1, 1, count, count])
            is_upper = np.arange(planes) % self._layers >= first_msa_layer
            is_upper = is_upper.astype(np.float16).reshape(-1, 1, 1, 1)
            selection = mb.add(x=mb.mul(x=selection, y=1 - is_upper), y=mb.mul(x=upper, y=is_upper))
        scratch = mb.slice_by_size(
            x=self._value, begin=[0, 0, self._context, 0], size=[planes, groups, count, d]
        )
        self.write(mb.matmul(x=selection, y=scratch), position)


def stack_rows(keys_values: list[tuple], count: int):
    """Each layer's keys and values [n_kv, n ≤ count, head_dim] → [2·L, n_kv, count, head_dim]."""
    in_order = [keys for keys, _ in keys_values] + [values for _, values in keys_values]
    planes = [mb.expand_dims(x=_pad_rows(rows, count), axes=[0]) for rows in in_order]
    return mb.concat(values=planes, axis=0)


def _pad_rows(rows, count: int):
    groups, n, d = rows.shape
    if n == count:
        return rows
    return mb.concat(values=[rows, np.zeros((groups, count - n, d), np.float16)], axis=1)
