"""`<app>_step`: verify a draft tree and write the next draft (METHOD: One decoding step)."""

from __future__ import annotations

import numpy as np
from coremltools.converters.mil import Builder as mb

from ss_convert.coreml.cache import Cache, stack_rows
from ss_convert.coreml.layers import Decoder, gather_rotary, split_rotary
from ss_convert.coreml.options import CoreMLOptions
from ss_convert.coreml.prefill_function import plain_layer
from ss_convert.coreml.pruning import kept_selection
from ss_convert.coreml.selection import row_sums, select
from ss_convert.coreml.streams import StreamLayers
from ss_convert.coreml.tables import stream_offsets
from ss_convert.coreml.tree_inputs import Nodes, keep_nodes, read_nodes
from ss_convert.coreml.verification import accepted_row
from ss_device.config import SpeculativeConfig


def build_step(
    decoder: Decoder, config: SpeculativeConfig, options: CoreMLOptions, rotary_table, inputs: dict
) -> dict:
    """The function's body; `inputs` as in `interface.step_inputs`, plus `kv_cache`. → outputs by name."""
    layers = StreamLayers(decoder, config, options.num_kept)
    cache = Cache(inputs["kv_cache"], decoder.architecture, options.context)
    cache.commit(inputs["commit_position"], inputs["commit_nodes"], inputs.get("commit_rows"), layers.first)
    tokens = mb.squeeze(x=inputs["tokens"], axes=[0])
    nodes = read_nodes(inputs, options.num_nodes, options.context)
    rotary = gather_rotary(rotary_table, inputs["positions"])
    hidden, lower = _lower_layers(decoder, layers.first, tokens, rotary, cache, inputs["mask"])
    selection = None
    if options.prunes:
        selection = kept_selection(decoder, config, options, hidden, tokens, nodes)
        nodes, rotary = keep_nodes(nodes, selection), select(selection, rotary)
    streams = _stream_rotary(rotary_table, inputs["positions"], config, selection)
    rotary = split_rotary(mb.concat(values=[rotary, streams], axis=0))
    mask = layers.mask(nodes, inputs.get("stream_gate"))
    rows, upper = layers.run(select(selection, hidden), rotary, cache, mask)
    cache.write_scratch(stack_rows(lower + upper, options.num_nodes))
    logits = decoder.head(decoder.norm(layers.main_rows(rows), "norm"))
    chosen = mb.reduce_argmax(x=logits, axis=-1, keep_dims=False)
    accepted = accepted_row(tokens, nodes, selection, chosen)
    return {
        "kept": _kept_ids(nodes, selection, inputs["parents"]),
        "chosen": chosen,
        "accepted": mb.cast(x=row_sums(mb.mul(x=accepted, y=nodes.ids)), dtype="int32"),
        "stream_logits": _stream_logits(decoder, layers, rows, accepted),
    }


def _lower_layers(decoder: Decoder, count: int, tokens, rotary, cache: Cache, mask):
    """Layers 0..count-1 on all nodes → (states [N, h], per layer the keys and values)."""
    hidden, keys_values = decoder.embed(tokens), []
    for layer in range(count):
        hidden, new = plain_layer(decoder, layer, hidden, split_rotary(rotary), cache, mask)
        keys_values.append(new)
    return hidden, keys_values


def _stream_rotary(table, positions, config: SpeculativeConfig, selection):
    """Rotary rows [K·γ, 4·head_dim] of the kept nodes' streams."""
    gamma, count = config.num_streams, positions.shape[0]
    flat = mb.reshape(
        x=mb.add(x=mb.expand_dims(x=positions, axes=[1]), y=stream_offsets(config)[None]), shape=[-1]
    )
    rows = gather_rotary(table, flat)
    width = rows.shape[1]
    # Selected as rotary rows rather than as positions, which fp16 holds exactly only up to 2048.
    chosen = select(selection, mb.reshape(x=rows, shape=[count, gamma * width]))
    return mb.reshape(x=chosen, shape=[-1, width])


def _stream_logits(decoder: Decoder, layers: StreamLayers, rows, accepted):
    """[γ, V] of one node; its rows are selected first, so that the head runs on γ rows, not K·γ."""
    streams = mb.matmul(x=accepted, y=layers.stream_rows(rows))
    streams = mb.reshape(x=streams, shape=[layers.config.num_streams, -1])
    return decoder.head(decoder.norm(streams, "norm"))


def _kept_ids(kept: Nodes, selection, parents):
    if selection is not None:
        return mb.cast(x=kept.ids, dtype="int32")
    # Without pruning the ids are constant, and a function must not return a constant.
    return mb.add(x=mb.mul(x=parents, y=np.int32(0)), y=np.arange(kept.count, dtype=np.int32))
