"""Key/value buffers of one sequence: static shapes in buckets, rows written and committed by slot.

A buffer's slots 0..length-1 hold the committed text. A step writes its rows (tree nodes, then their
streams) into the slots behind it; what is not committed is overwritten by the next step. So a step can
be repeated, and nothing has to be rolled back. Values stand in the model's dtype, or quantized
(`packed_rows`): then every row is packed when it is written, and only the packed row exists.
"""

from __future__ import annotations

from copy import copy

import mlx.core as mx

from ss_runtime.mlx.packed_rows import PackedRows, empty_rows, reads_packed

# One layer's: keys and values, or of both codes, scales and biases. Each [1, kv_heads, capacity, width].
Buffers = tuple[mx.array, ...]
Layers = list[Buffers]
FLOAT_NAMES = ("keys", "values")
PACKED_NAMES = ("keys", "key_scales", "key_biases", "values", "value_scales", "value_biases")


def write_rows(buffer: mx.array, rows: mx.array, slot: mx.array) -> mx.array:
    """`buffer` [1, kv_heads, C, width] with `rows` [1, kv_heads, R, width] from `slot` [1] on."""
    return mx.slice_update(buffer, rows, slot, (2,))


def write_keys_values(buffers: Buffers, keys: mx.array, values: mx.array, slot: mx.array) -> Buffers:
    """A layer's buffers with keys and values [1, kv_heads, R, head_dim] from `slot` [1] on, packed where
    the buffers are."""
    rows = keys, values
    if len(buffers) > len(rows):
        packed = _packed(buffers, keys.shape[-1])
        rows = [part for kind, new in zip(packed, rows, strict=True) for part in kind.pack(new)]
    return tuple(write_rows(buffer, new, slot) for buffer, new in zip(buffers, rows, strict=True))


def read_keys_values(
    buffers: Buffers, slots: int, head_dim: int
) -> tuple[mx.array, mx.array] | tuple[PackedRows, PackedRows]:
    """Keys and values of the first `slots` slots: [1, kv_heads, slots, head_dim]."""
    first = tuple(buffer[:, :, :slots] for buffer in buffers)
    if len(first) == 2:
        return first
    keys, values = _packed(first, head_dim)
    return (keys, values) if reads_packed() else (keys.unpack(), values.unpack())


def _packed(buffers: Buffers, head_dim: int) -> tuple[PackedRows, PackedRows]:
    return PackedRows(*buffers[:3], head_dim), PackedRows(*buffers[3:], head_dim)


class KVCache:
    """Keys and values of every layer.

    `bucket` is the unit in slots by which buffers grow: a compiled step is traced once per capacity.
    bits: of a quantized key or value; None: they stand in `dtype`. Raises UserError for bits that do not
    go with `head_dim`.
    """

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: mx.Dtype,
        bucket: int,
        bits: int | None = None,
    ):
        self.bucket, self.bits = bucket, bits
        self.length = 0
        self._empty: Buffers = empty_rows(kv_heads, head_dim, dtype, bits) * 2
        self._num_layers = num_layers
        self.layers: Layers = [self._empty] * num_layers

    @property
    def capacity(self) -> int:
        return self.layers[0][0].shape[2]

    @property
    def available(self) -> int:
        """Committed positions that a prefill may keep: none after a step that was interrupted."""
        return self.length if self.layers else 0

    def empty(self) -> KVCache:
        """Another one of the same kind, for another text."""
        other = copy(self)
        other.length, other.layers = 0, [self._empty] * self._num_layers
        return other

    @property
    def num_bytes(self) -> int:
        """Device memory of the buffers."""
        return sum(buffer.nbytes for buffers in self.layers for buffer in buffers)

    @property
    def names(self) -> tuple[str, ...]:
        """Of a layer's buffers, in their order."""
        return FLOAT_NAMES if self.bits is None else PACKED_NAMES

    def stacked(self, tokens: int) -> dict[str, tuple[tuple[int, ...], mx.Dtype]]:
        """Of a text's arrays over all layers, by name: (layers, kv_heads, tokens, width) and type."""
        found = zip(self.names, self._empty, strict=True)
        return {n: ((self._num_layers, e.shape[1], tokens, e.shape[3]), e.dtype) for n, e in found}

    def reset(self) -> None:
        """Forget the text. Buffers stay: what they hold is masked until it is overwritten."""
        self.length = 0
        if not self.layers:  # a step that was interrupted took them along
            self.layers = [self._empty] * self._num_layers

    def reserve(self, slots: int) -> None:
        """Make room for `slots` rows behind the committed text."""
        missing = self.length + slots - self.capacity
        if missing <= 0:
            return
        growth = -(-missing // self.bucket) * self.bucket
        fresh = [mx.zeros((*e.shape[:2], growth, e.shape[3]), e.dtype) for e in self._empty]
        self.layers = [
            tuple(mx.concatenate(pair, axis=2) for pair in zip(buffers, fresh, strict=True))
            for buffers in self.layers
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
