"""Multi-stream attention layers: kept nodes and their γ streams as rows of one layer (METHOD: Streams).

Rows are [K main | K·γ streams], node by node. Keys of the streams stand behind those of the prefix and the
nodes; a constant mask says who sees them.
"""

from __future__ import annotations

import numpy as np
from coremltools.converters.mil import Builder as mb

from ss_convert.coreml.cache import Cache
from ss_convert.coreml.layers import Decoder, Rotary, attend, low_rank, split
from ss_convert.coreml.tables import main_stream_columns, own_stream_mask
from ss_convert.coreml.tree_inputs import Nodes
from ss_device.config import SpeculativeConfig


class StreamLayers:
    """Builds the layers from L - N_s on. One per step function."""

    def __init__(self, decoder: Decoder, config: SpeculativeConfig, num_kept: int) -> None:
        self.decoder = decoder
        self.config = config
        self.first = decoder.architecture.num_layers - config.num_msa_layers
        self._sizes = [num_kept, num_kept * config.num_streams]

    def start(self, main):
        """S[i, j] = f_η(M[i]) + P[j]: main rows [K, h] → all rows [K·(1+γ), h]."""
        part, hidden = self.decoder.weights.part, main.shape[1]
        seed = main
        if self.config.stream_init_rank:
            seed = mb.add(x=main, y=low_rank(main, part("stream_init.down"), part("stream_init.up")))
        streams = mb.add(x=mb.expand_dims(x=seed, axes=[1]), y=part("stream_embeddings")[None])
        return mb.concat(values=[main, mb.reshape(x=streams, shape=[-1, hidden])], axis=0)

    def mask(self, nodes: Nodes, gate=None):
        """Additive mask [K·(1+γ), C + K + K·γ]; a stream sees what its node sees."""
        main = mb.concat(values=[nodes.mask_prefix, nodes.mask_nodes], axis=1)
        kept, gamma = self._sizes[0], self.config.num_streams
        repeated = mb.tile(x=mb.expand_dims(x=main, axes=[1]), reps=[1, gamma, 1])
        repeated = mb.reshape(x=repeated, shape=[kept * gamma, main.shape[1]])
        own = own_stream_mask(self.config, kept)
        if gate is not None:
            own = mb.add(x=mb.mul(x=main_stream_columns(self.config, kept), y=gate), y=own)
        return mb.concat(values=[mb.concat(values=[main, repeated], axis=0), own], axis=1)

    def run(self, main, rotary: Rotary, cache: Cache, mask):
        """The MSA layers on main rows [K, h] → (all rows, per layer the main rows' keys and values)."""
        rows, keys_values = self.start(main), []
        for layer in range(self.first, self.decoder.architecture.num_layers):
            rows, new = self.layer(layer, rows, rotary, cache, mask)
            keys_values.append(new)
        return rows, keys_values

    def layer(self, layer: int, rows, rotary: Rotary, cache: Cache, mask):
        """One MSA layer → (rows, (keys, values)); keys and values [n_kv, K, d] of main rows alone."""
        decoder, correction = self.decoder, self._correction()
        normed = decoder.norm(rows, f"layers.{layer}.attn_norm")
        k, v = decoder.keys_values(layer, normed, rotary, correction)
        past_k, past_v = cache.prefix(layer)
        mixed = attend(
            decoder.queries(layer, normed, rotary, correction),
            mb.concat(values=[past_k, k], axis=1),
            mb.concat(values=[past_v, v], axis=1),
            mask,
        )
        rows = mb.add(x=rows, y=decoder.project(layer, "o", mixed, correction))
        rows = mb.add(x=rows, y=self._feed_forward(layer, rows, correction))
        return rows, (split(k, self._sizes, axis=1)[0], split(v, self._sizes, axis=1)[0])

    def main_rows(self, rows):
        return split(rows, self._sizes, axis=0)[0]

    def stream_rows(self, rows):
        """Stream rows node by node: [K, γ·h]."""
        streams = split(rows, self._sizes, axis=0)[1]
        return mb.reshape(x=streams, shape=[self._sizes[0], -1])

    def _feed_forward(self, layer: int, rows, correction):
        normed = self.decoder.norm(rows, f"layers.{layer}.mlp_norm")
        main, streams = split(normed, self._sizes, axis=0)
        adapted = self._adapter(layer, streams)
        if self.config.stream_mlp == "adapter":
            main = self.decoder.mlp(layer, main)
            if adapted is None:
                adapted = np.zeros(streams.shape, np.float16)
            return mb.concat(values=[main, adapted], axis=0)
        both = self.decoder.mlp(layer, normed, correction)
        return both if adapted is None else self._add_to_streams(both, adapted)

    def _adapter(self, layer: int, streams):
        if not self.config.stream_adapter_rank:
            return None
        part, name = self.decoder.weights.part, f"stream_adapters.{layer - self.first}"
        return low_rank(streams, part(f"{name}.down"), part(f"{name}.up"))

    def _correction(self):
        """Stream LoRA: scale · b @ (a @ x) on the rows of streams only."""
        if not self.config.stream_lora_rank:
            return None
        part, scale = self.decoder.weights.part, self.config.stream_lora_scale

        def correct(layer: int, name: str, rows, out):
            factors = f"stream_lora.{layer - self.first}.{name}"
            streams = split(rows, self._sizes, axis=0)[1]
            delta = low_rank(streams, part(f"{factors}.a"), part(f"{factors}.b"), scale)
            return self._add_to_streams(out, delta)

        return correct

    def _add_to_streams(self, rows, delta):
        main, streams = split(rows, self._sizes, axis=0)
        return mb.concat(values=[main, mb.add(x=streams, y=delta)], axis=0)
