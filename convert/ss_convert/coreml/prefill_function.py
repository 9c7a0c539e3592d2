"""`<app>_prefill`: a causal chunk of prompt tokens, no streams (METHOD: Streams, which carry none)."""

from __future__ import annotations

import numpy as np
from coremltools.converters.mil import Builder as mb

from ss_convert.coreml.cache import Cache, stack_rows
from ss_convert.coreml.layers import Decoder, attend, gather_rotary, split, split_rotary
from ss_convert.coreml.options import CoreMLOptions


def build_prefill(decoder: Decoder, options: CoreMLOptions, rotary_table, inputs: dict):
    """The function's body; `inputs` as in `interface.prefill_inputs`, plus `kv_cache`. → outputs by name.

    The last layer stops at its keys and values: nobody reads its output.
    """
    layers, chunk = decoder.architecture.num_layers, options.chunk
    offsets = np.arange(chunk, dtype=np.int32)
    rotary = split_rotary(gather_rotary(rotary_table, mb.add(x=inputs["position"], y=offsets)))
    cache = Cache(inputs["kv_cache"], decoder.architecture, options.context)
    hidden = decoder.embed(mb.squeeze(x=inputs["tokens"], axes=[0]))
    keys_values = []
    for layer in range(layers):
        last = layer == layers - 1
        hidden, new = plain_layer(decoder, layer, hidden, rotary, cache, inputs["mask"], last)
        keys_values.append(new)
    cache.write(stack_rows(keys_values, chunk), inputs["position"])
    return {"hidden": split(hidden, [chunk - 1, 1], axis=0)[1] if chunk > 1 else mb.identity(x=hidden)}


def plain_layer(decoder: Decoder, layer: int, hidden, rotary, cache: Cache, mask, keys_only=False):
    """A layer on main rows alone → (rows, (keys, values)); `keys_only` leaves the rows."""
    normed = decoder.norm(hidden, f"layers.{layer}.attn_norm")
    k, v = decoder.keys_values(layer, normed, rotary)
    if keys_only:
        return hidden, (k, v)
    past_k, past_v = cache.prefix(layer)
    mixed = attend(
        decoder.queries(layer, normed, rotary),
        mb.concat(values=[past_k, k], axis=1),
        mb.concat(values=[past_v, v], axis=1),
        mask,
    )
    hidden = mb.add(x=hidden, y=decoder.project(layer, "o", mixed))
    normed = decoder.norm(hidden, f"layers.{layer}.mlp_norm")
    return mb.add(x=hidden, y=decoder.mlp(layer, normed)), (k, v)
