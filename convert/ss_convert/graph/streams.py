"""Multi-stream attention: kept nodes and their γ streams as rows of one layer (docs/method.md, Streams).

Rows are [K main | K·γ streams], node by node. Keys of the streams stand behind those of the prefix and the
nodes; a constant mask says who sees them.
"""

from __future__ import annotations

import numpy as np

from ss_convert.graph.cache import Cache
from ss_convert.graph.layers import Decoder, View, rotate, split
from ss_convert.graph.operations import op
from ss_convert.graph.tables import main_stream_columns, own_stream_mask, rest, value_turns
from ss_convert.graph.tree import Nodes
from ss_device.config import SpeculativeConfig


class StreamLayers:
    """Builds the layers from L - N_s on. One per step function."""

    def __init__(self, decoder: Decoder, config: SpeculativeConfig, num_kept: int) -> None:
        self.decoder = decoder
        self.config = config
        self.first_msa_layer = decoder.architecture.num_layers - config.num_msa_layers
        self._sizes = [num_kept, num_kept * config.num_streams]

    def start(self, main, position_step=None):
        """S[i, j] = f_η(M[i]) + P[j]: main states [K, h] → K·(1+γ) rows.

        Without P where values are turned instead (v1 App. B).
        position_step [K·γ, h] is added to the streams (learned positions).
        """
        part, hidden, layout = self.decoder.weights.part, main.shape[1], self.decoder.layout
        seed = main
        if self.config.stream_init_rank:
            down, up = part("stream_init.down"), part("stream_init.up")
            moved = self.decoder.low_rank("stream_init", layout.enter(main), down, up)
            seed = op.add(main, layout.leave(moved))
        streams = op.expand_dims(seed, axes=[1])
        if self.config.value_rotation:
            streams = op.tile(streams, reps=[1, self.config.num_streams, 1])
        else:
            streams = op.add(streams, self._embeddings())
        streams = op.reshape(streams, shape=[-1, hidden])
        if position_step is not None:
            streams = op.add(streams, position_step)
        return layout.enter(op.concat([main, streams], axis=0))

    def _embeddings(self):
        """The streams' embeddings [1, γ, h]: a constant, or an input of the function."""
        given = self.decoder.weights.part("stream_embeddings")
        if isinstance(given, np.ndarray):
            return self.decoder.constant("stream_embeddings", lambda: given[None])
        return op.expand_dims(given, axes=[0])

    def mask(self, nodes: Nodes, gate=None):
        """Additive mask [K·(1+γ), C + K + K·γ]; a stream sees what its node sees."""
        main = op.concat([nodes.mask_prefix, nodes.mask_nodes], axis=1)
        kept, gamma = self._sizes[0], self.config.num_streams
        repeated = op.tile(op.expand_dims(main, axes=[1]), reps=[1, gamma, 1])
        repeated = op.reshape(repeated, shape=[kept * gamma, main.shape[1]])
        own = own_stream_mask(self.config, kept)
        if gate is not None:
            own = op.add(op.mul(main_stream_columns(self.config, kept), gate), own)
        return op.concat([op.concat([main, repeated], axis=0), own], axis=1)

    def run(self, rows, layers: range, cache: Cache, views: dict):
        """MSA layers on rows of `start` → (all rows, per layer the main rows' keys and values).

        views: what layers see, by window.
        """
        keys_values = []
        for layer in layers:
            view = views[self.decoder.architecture.window(layer)]
            rows, new = self.layer(layer, rows, view, cache)
            keys_values.append(new)
        return rows, keys_values

    def layer(self, layer: int, rows, view: View, cache: Cache):
        """One MSA layer → (rows, (keys, values)); keys and values [n_kv, K, d] of main rows alone."""
        decoder, correction = self.decoder, self._correction()
        normed = decoder.norm(rows, f"layers.{layer}.attn_norm")
        turn = self._turn if self.config.value_rotation else None
        attended, (k, v) = decoder.attention(layer, normed, view, cache.prefix(layer), correction, turn)
        rows = decoder.add_blocks(
            layer, rows, normed, attended, lambda x: self._feed_forward(layer, x, correction)
        )
        return rows, (split(k, self._sizes, axis=1)[0], split(v, self._sizes, axis=1)[0])

    def _turn(self, values):
        """Values [n_kv, K·(1+γ), d] with those of streams turned (v1 App. B, Eq. 7)."""
        main, streams = split(values, self._sizes, axis=1)
        cosine, sine = value_turns(self.config, self._sizes[0], values.shape[2])
        turned = op.add(
            rotate(streams, *(table.astype(np.float16) for table in (cosine, sine))),
            # What fp16 leaves of the tables, so that the graph in float32 equals the reference.
            rotate(streams, *(rest(table) for table in (cosine, sine))),
        )
        return op.concat([main, turned], axis=1)

    def main_rows(self, rows):
        return self.decoder.layout.split(rows, self._sizes)[0]

    def stream_rows(self, rows):
        """Stream rows node by node: [K, γ·h]."""
        streams = self.decoder.layout.leave(self.decoder.layout.split(rows, self._sizes)[1])
        return op.reshape(streams, shape=[self._sizes[0], -1])

    def _feed_forward(self, layer: int, normed, correction):
        main, streams = self.decoder.layout.split(normed, self._sizes)
        adapted = self._adapter(layer, streams)
        if self.config.stream_mlp == "adapter":
            main = self.decoder.mlp(layer, main)
            if adapted is None:
                adapted = np.zeros(streams.shape, np.float16)
            return self.decoder.layout.join([main, adapted])
        both = self.decoder.mlp(layer, normed, correction)
        return both if adapted is None else self._add_to_streams(both, adapted)

    def _adapter(self, layer: int, streams):
        if not self.config.stream_adapter_rank:
            return None
        part, name = self.decoder.weights.part, f"stream_adapters.{layer - self.first_msa_layer}"
        return self.decoder.low_rank(name, streams, part(f"{name}.down"), part(f"{name}.up"))

    def _correction(self):
        """Stream LoRA: scale · b @ (a @ x) on the rows of streams only."""
        if not self.config.stream_lora_rank:
            return None
        part, scale = self.decoder.weights.part, self.config.stream_lora_scale

        def correct(layer: int, name: str, rows, out):
            factors = f"stream_lora.{layer - self.first_msa_layer}.{name}"
            streams = self.decoder.layout.split(rows, self._sizes)[1]
            delta = self.decoder.low_rank(
                factors, streams, part(f"{factors}.a"), part(f"{factors}.b"), scale
            )
            return self._add_to_streams(out, delta)

        return correct

    def _add_to_streams(self, rows, delta):
        main, streams = self.decoder.layout.split(rows, self._sizes)
        return self.decoder.layout.join([main, op.add(streams, delta)])
