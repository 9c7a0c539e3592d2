"""Key/value buffers of one sequence: static shapes in buckets, rows written and committed by slot.

A buffer's slots 0..length-1 hold the committed text. A step writes its rows (tree nodes, then their
streams) into the slots behind it; what is not committed is overwritten by the next step. So a step can
be repeated, and nothing has to be rolled back.
"""

from __future__ import annotations

import mlx.core as mx

Layers = list[tuple[mx.array, mx.array]]


def write_rows(buffer: mx.array, rows: mx.array, slot: mx.array) -> mx.array:
    """`buffer` [1, kv_heads, C, head_dim] with `rows` [1, kv_heads, R, head_dim] from `slot` [1] on."""
    return mx.slice_update(buffer, rows, slot, (2,))


class KVCache:
    """Keys and values of every layer. `layers`: (keys, values), each [1, kv_heads, capacity, head_dim].

    `bucket` is the unit in slots by which buffers grow: a compiled step is traced once per capacity.
    """

    def __init__(self, num_layers: int, kv_heads: int, head_dim: int, dtype: mx.Dtype, bucket: int):
        self.bucket = bucket
        self.length = 0
        self._empty = mx.zeros((1, kv_heads, 0, head_dim), dtype)
        self._num_layers = num_layers
        self.layers: Layers = [(self._empty, self._empty)] * num_layers

    @property
    def capacity(self) -> int:
        return self.layers[0][0].shape[2]

    @property
    def num_bytes(self) -> int:
        """Device memory of the buffers."""
        return sum(buffer.nbytes for pair in self.layers for buffer in pair)

    def shape(self, tokens: int) -> tuple[int, int, int, int]:
        """Of the stacked keys of a text: layers, kv_heads, tokens, head_dim."""
        return self._num_layers, self._empty.shape[1], tokens, self._empty.shape[3]

    def reset(self) -> None:
        """Forget the text. Buffers stay: what they hold is masked until it is overwritten."""
        self.length = 0
        if not self.layers:  # a step that was interrupted took them along
            self.layers = [(self._empty, self._empty)] * self._num_layers

    def reserve(self, slots: int) -> None:
        """Make room for `slots` rows behind the committed text."""
        missing = self.length + slots - self.capacity
        if missing <= 0:
            return
        growth = -(-missing // self.bucket) * self.bucket
        _, kv_heads, _, head_dim = self._empty.shape
        fresh = mx.zeros((1, kv_heads, growth, head_dim), self._empty.dtype)
        self.layers = [
            tuple(mx.concatenate([buffer, fresh], axis=2) for buffer in pair) for pair in self.layers
        ]

    def commit(self, sources: list[list[int]]) -> None:
        """Move rows behind the text to its end, and make them part of it.

        sources: per layer, offsets from `length` of the rows to keep, in text order. Rows that already
        lie in their place are not touched. Builds graph only: nothing is computed here.
        """
        count = len(sources[0])
        start = mx.array([self.length])
        indices = {tuple(rows): mx.array(rows) + self.length for rows in sources}
        for layer, rows in enumerate(sources):
            if rows != list(range(count)):
                index = indices[tuple(rows)]
                self.layers[layer] = tuple(
                    write_rows(buffer, mx.take(buffer, index, axis=2), start)
                    for buffer in self.layers[layer]
                )
        self.length += count
