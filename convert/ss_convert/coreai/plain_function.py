"""`main`: the base alone, as Apple's engines of language models drive it (`apple/coreai-models`, CoreAILM).

S tokens of this call, P positions up to and with them, R rows of the caches (P ≤ R), L layers. S, P and R
vary from call to call; the caller makes the caches and may make them longer between calls.

    input_ids        int32 [1, S]
    position_ids     int32 [1, P]    0..P-1; the tokens are the last S of them
    keyCache         fp16 [L, 1, n_kv, R, head_dim]  state; row p belongs to position p. Rows from P - S on
    valueCache       the same                        are written, rows from P on are not read
  → logits           fp16 [1, S, V]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ss_convert.graph.attention import for_attention
from ss_convert.graph.functions import GraphFunction, num_positions
from ss_convert.graph.interface import MASKED, Shapes
from ss_convert.graph.layers import Decoder, View, gather_tables, split_rotary
from ss_convert.graph.operations import op
from ss_convert.graph.options import COMPOSITE, GraphOptions
from ss_convert.graph.prefill_function import plain_layer
from ss_convert.graph.tables import rotary_tables
from ss_convert.graph.tree import outside_window
from ss_convert.graph.weights import BaseWeights, PlainWeights
from ss_device.architecture import Architecture
from ss_device.config import SpeculativeConfig

MAIN = "main"
TOKENS, POSITIONS, LOGITS = "input_ids", "position_ids", "logits"
KEYS, VALUES = "keyCache", "valueCache"
INPUTS: Shapes = {TOKENS: ("int32", (1, -1)), POSITIONS: ("int32", (1, -1))}


def plain_function(
    architecture: Architecture, weights: BaseWeights, config: SpeculativeConfig, options: GraphOptions
) -> GraphFunction:
    """`main` beside the functions of an adapter with `config`, whose tables it shares.

    It has the layout and the weights of `options`, and their context. Its attention is Apple's composite
    where the architecture allows it, as in Apple's own exports for these engines.
    """
    options = replace(options, attention=COMPOSITE)
    scaled = for_attention(architecture, options.attention)
    tables = rotary_tables(scaled, num_positions(config, options), options.context)
    shape = (architecture.num_layers, 1, architecture.num_kv_heads, -1, architecture.head_dim)

    def body(inputs: dict) -> dict:
        return build_main(
            Decoder(architecture, PlainWeights(architecture, weights), options), tables, inputs
        )

    return GraphFunction(MAIN, INPUTS, dict.fromkeys((KEYS, VALUES), ("float16", shape)), body)


def build_main(decoder: Decoder, tables: Mapping, inputs: dict) -> dict:
    """The function's body → outputs by name. tables: `tables.rotary_tables`."""
    tokens, past = op.squeeze(inputs[TOKENS], axes=[0]), op.squeeze(inputs[POSITIONS], axes=[0])
    cache = GrowingCache(inputs[KEYS], inputs[VALUES], op.size(past, 0), op.size(tokens, 0))
    positions = op.behind(past, 0, cache.first)
    rotary = gather_tables(tables, positions)
    views = {
        window: View(_mask(positions, past, window), split_rotary(rotary[window])) for window in tables
    }
    hidden = decoder.embed(tokens, positions)
    for layer in decoder.part.layers:
        hidden, _ = plain_layer(decoder, layer, hidden, views, cache)
    logits = decoder.head(decoder.norm(hidden, "norm"))
    return {LOGITS: op.expand_dims(logits, axes=[0])}


def _mask(positions, past, window: int | None):
    """Additive mask [S, P]: a row sees positions up to its own, and within the window."""
    keys = op.expand_dims(past, axes=[0])
    later = op.to_float(op.greater(keys, op.expand_dims(positions, axes=[1])))
    mask = op.mul(later, np.float16(MASKED))
    return mask if window is None else op.add(mask, outside_window(positions, keys, window))


class GrowingCache:
    """The two states in place of `kv_cache`. A layer's rows are written before they are read.

    end, count: int32 [1], P and S; first: the position of the first row.
    """

    def __init__(self, keys, values, end, count) -> None:
        self.first, self._end = op.sub(end, count), end
        self._states = (keys, values)

    def prefix(self, layer: int) -> _Written:
        """What a layer's rows see before their own: it is read together with them."""
        return _Written(self, layer)

    def written(self, layer: int, rows: tuple) -> tuple:
        """Write a layer's new keys and values [n_kv, S, d] → all of them up to these, [n_kv, P, d]."""
        return tuple(self._write(s, layer, new) for s, new in zip(self._states, rows, strict=True))

    def _write(self, state, layer: int, rows):
        begin = op.concat([np.array([layer, 0, 0], np.int32), self.first, np.zeros(1, np.int32)], axis=0)
        rows = op.expand_dims(rows, axes=[0, 1])
        value = op.update_state(state, op.read_state(state), rows, begin)
        plane = op.slice_by_size(value, begin=[layer, 0, 0, 0, 0], size=[1, *value.shape[1:]])
        return op.leading(op.squeeze(plane, axes=[0, 1]), 1, self._end)


class _Written:
    """`cache.Past` of a layer of a `GrowingCache`."""

    def __init__(self, cache: GrowingCache, layer: int) -> None:
        self._cache, self._layer = cache, layer

    def followed_by(self, keys, values) -> tuple:
        return self._cache.written(self._layer, (keys, values))
