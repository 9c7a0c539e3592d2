"""`<app>_prefill`: a causal chunk of prompt tokens, no streams (docs/method.md, Streams)."""

from __future__ import annotations

import numpy as np

from ss_convert.graph.cache import Cache, open_cache, stack_rows
from ss_convert.graph.layers import Decoder, View, gather_tables, split, split_rotary
from ss_convert.graph.operations import op
from ss_convert.graph.options import GraphOptions
from ss_convert.graph.tree import outside_window


def build_prefill(decoder: Decoder, options: GraphOptions, rotary_tables: dict, inputs: dict):
    """The function's body; `inputs` as in `interface.prefill_inputs`, plus `kv_cache`. → outputs by name.

    rotary_tables: `tables.rotary_tables` of the part's windows. The decoder's last layer stops at its
    keys and values: nobody reads its output.
    """
    part, chunk = decoder.part, options.chunk
    positions = op.add(inputs["position"], np.arange(chunk, dtype=np.int32))
    rotary = {w: split_rotary(rows) for w, rows in gather_tables(rotary_tables, positions).items()}
    masks = {window: _mask(inputs.get("mask"), positions, window, options) for window in rotary}
    views = {window: View(masks[window], rotary[window]) for window in rotary}
    cache = open_cache(inputs, decoder.architecture, part, options)
    if part.is_first:
        hidden = decoder.embed(op.squeeze(inputs["tokens"], axes=[0]), positions)
    else:
        hidden = decoder.layout.enter(inputs["previous_hidden"])
    keys_values = []
    for layer in part.layers:
        last = layer == part.num_layers - 1
        hidden, new = plain_layer(decoder, layer, hidden, views, cache, last)
        keys_values.append(new)
    cache.write(stack_rows(keys_values, chunk), inputs["position"])
    hidden = decoder.layout.leave(hidden)
    if not part.is_last:
        return {"hidden": hidden} | cache.outputs()
    last_row = split(hidden, [chunk - 1, 1], axis=0)[1] if chunk > 1 else op.identity(hidden)
    return {"hidden": last_row} | cache.outputs()


def _mask(mask, positions, window: int | None, options: GraphOptions):
    """The chunk's mask [T, C + T] for layers with this window."""
    if window is None or mask is None:
        return mask
    slots = np.arange(options.context, dtype=np.int32)
    keys = op.expand_dims(op.concat([slots, positions], axis=0), axes=[0])
    return op.add(mask, outside_window(positions, keys, window))


def plain_layer(decoder: Decoder, layer: int, hidden, views: dict, cache: Cache, keys_only=False):
    """A layer on main rows alone → (rows, (keys, values)); `keys_only` leaves the rows.

    views: what layers see, by window.
    """
    view = views[decoder.architecture.window(layer)]
    normed = decoder.norm(hidden, f"layers.{layer}.attn_norm")
    if keys_only:
        return hidden, decoder.keys_values(layer, normed, view.rotary)
    attended, new = decoder.attention(layer, normed, view, cache.prefix(layer))
    rows = decoder.add_blocks(layer, hidden, normed, attended, lambda x: decoder.mlp(layer, x))
    return rows, new
