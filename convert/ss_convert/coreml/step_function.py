"""`<app>_step`: verify a draft tree and write the next draft (docs/method.md, One decoding step)."""

from __future__ import annotations

import numpy as np
from coremltools.converters.mil import Builder as mb

from ss_convert.coreml.cache import Cache, stack_rows
from ss_convert.coreml.layers import Decoder, View, gather_tables, split_rotary
from ss_convert.coreml.options import CoreMLOptions
from ss_convert.coreml.parts import split_layers
from ss_convert.coreml.prefill_function import plain_layer
from ss_convert.coreml.streams import StreamLayers
from ss_convert.coreml.tables import stream_offsets
from ss_convert.coreml.tree import (
    Nodes,
    accepted_row,
    keep_nodes,
    kept_selection,
    one_hot,
    read_nodes,
    row_sums,
    select,
    within_window,
)
from ss_device.config import SpeculativeConfig


def build_step(
    decoder: Decoder, config: SpeculativeConfig, options: CoreMLOptions, rotary_tables: dict, inputs: dict
) -> dict:
    """The function's body; `inputs` as in `interface.step_inputs`, plus `kv_cache`. → outputs by name.

    rotary_tables: `tables.rotary_tables` of the part's windows. A part without MSA layers hands on the
    states of all nodes, one with them those of the kept nodes and their streams.
    """
    part, layers = decoder.part, StreamLayers(decoder, config, options.num_kept)
    cache = Cache(inputs["kv_cache"], decoder.architecture, part, options.context, options.commit)
    committed = (inputs.get("commit_nodes"), inputs.get("commit_rows"))
    cache.commit(inputs["commit_position"], *committed, layers.first_msa_layer)
    tokens = mb.squeeze(x=inputs["tokens"], axes=[0]) if "tokens" in inputs else None
    positions = inputs.get("positions")
    nodes = read_nodes(inputs, options.num_nodes, options.context)
    seen = {window: within_window(nodes, positions, window) for window in rotary_tables}
    below, upper_layers = split_layers(part, layers.first_msa_layer)
    rotary = gather_tables(rotary_tables, positions)
    ahead = _stream_tables(rotary_tables, positions, config) if upper_layers else {}
    views = {w: View(_node_mask(inputs, n, w), split_rotary(rotary[w])) for w, n in seen.items()}
    hidden = (
        decoder.embed(tokens, positions)
        if part.is_first
        else decoder.layout.enter(inputs["previous_hidden"])
    )
    hidden, lower = _lower_layers(decoder, below, hidden, cache, views)
    if not upper_layers:
        cache.write_scratch(stack_rows(lower, options.num_nodes))
        return {"hidden": decoder.layout.leave(hidden)}
    selection = None
    if options.prunes:
        selection = (
            kept_selection(decoder, config, options, hidden, tokens, nodes)
            if part.first <= layers.first_msa_layer
            else one_hot(inputs["previous_kept"], options.num_nodes)
        )
        nodes = keep_nodes(nodes, selection)
        seen = {window: keep_nodes(all_nodes, selection) for window, all_nodes in seen.items()}
    gate = inputs.get("stream_gate")
    rotary = _with_streams(rotary, ahead, config, selection)
    views = {w: View(layers.mask(n, gate), split_rotary(rotary[w])) for w, n in seen.items()}
    rows = hidden
    if part.first <= layers.first_msa_layer:
        step = _position_step(decoder, positions, config, selection)
        rows = layers.start(select(selection, decoder.layout.leave(hidden)), step)
    rows, upper = layers.run(rows, upper_layers, cache, views)
    cache.write_scratch(stack_rows(lower + upper, options.num_nodes))
    if not part.is_last:
        passed = {"hidden": decoder.layout.leave(rows)}
        return passed | ({"kept": mb.cast(x=nodes.ids, dtype="int32")} if options.prunes else {})
    logits = decoder.head(decoder.norm(layers.main_rows(rows), "norm"))
    chosen = mb.reduce_argmax(x=logits, axis=-1, keep_dims=False)
    accepted = accepted_row(tokens, nodes, selection, chosen)
    outputs = {"logits": logits} if options.sampling else {}
    return outputs | {
        "kept": _kept_ids(nodes, selection, inputs["parents"]),
        "chosen": chosen,
        "accepted": mb.cast(x=row_sums(mb.mul(x=accepted, y=nodes.ids)), dtype="int32"),
        "stream_logits": _stream_logits(decoder, layers, rows, None if options.sampling else accepted),
    }


def _node_mask(inputs: dict, nodes: Nodes, window: int | None):
    if window is None:
        return inputs["mask"]
    return mb.concat(values=[nodes.mask_prefix, nodes.mask_nodes], axis=1)


def _lower_layers(decoder: Decoder, layers: range, hidden, cache: Cache, views: dict):
    """Layers on all nodes → (states [N, h], per layer the keys and values)."""
    keys_values = []
    for layer in layers:
        hidden, new = plain_layer(decoder, layer, hidden, views, cache)
        keys_values.append(new)
    return hidden, keys_values


def _stream_positions(positions, config: SpeculativeConfig):
    """int32 [N·γ]: positions of all nodes' streams, node by node."""
    offsets = stream_offsets(config)[None]
    return mb.reshape(x=mb.add(x=mb.expand_dims(x=positions, axes=[1]), y=offsets), shape=[-1])


def _stream_tables(tables: dict, positions, config: SpeculativeConfig) -> dict:
    """Rotary rows [N·γ, 4·rotated] of all nodes' streams by window; made in front of the layers, where
    what runs on the CPU costs no transfer in between."""
    if all(table is None for table in tables.values()):
        return {}
    return gather_tables(tables, _stream_positions(positions, config))


def _with_streams(rotary: dict, ahead: dict, config: SpeculativeConfig, selection) -> dict:
    """Rotary rows [K·(1+γ), 4·rotated] by window: those of the kept nodes, then of their streams."""

    def joined(nodes, streams):
        # Selected as rotary rows rather than as positions, which fp16 holds exactly only up to 2048.
        values = [select(selection, nodes), _select_streams(streams, config, selection)]
        return mb.concat(values=values, axis=0)

    done = {id(rows): joined(rows, ahead[w]) for w, rows in rotary.items() if rows is not None}
    return {window: done.get(id(rows)) for window, rows in rotary.items()}


def _position_step(decoder: Decoder, positions, config: SpeculativeConfig, selection):
    """Learned positions: what moves each stream from its node's position to its own, [K·γ, h]."""
    if decoder.architecture.positions != "learned":
        return None
    there = decoder.learned(_stream_positions(positions, config))
    here = mb.expand_dims(x=decoder.learned(positions), axes=[1])
    width = there.shape[1]
    there = mb.reshape(x=there, shape=[-1, config.num_streams, width])
    step = mb.reshape(x=mb.sub(x=there, y=here), shape=[-1, width])
    return _select_streams(step, config, selection)


def _select_streams(rows, config: SpeculativeConfig, selection):
    """Rows [N·γ, w] of all nodes' streams → [K·γ, w] of the kept ones."""
    width = rows.shape[1]
    by_node = mb.reshape(x=rows, shape=[-1, config.num_streams * width])
    return mb.reshape(x=select(selection, by_node), shape=[-1, width])


def _stream_logits(decoder: Decoder, layers: StreamLayers, rows, accepted):
    """[γ, V] of one node; its rows are selected first, so that the head runs on γ rows, not K·γ.

    accepted None: [K, γ, V] of every kept node, for a host whose own walk may end at any of them.
    """
    gamma, streams = layers.config.num_streams, layers.stream_rows(rows)
    kept, width = streams.shape
    if accepted is not None:
        streams = mb.matmul(x=accepted, y=streams)
    streams = mb.reshape(x=streams, shape=[-1, width // gamma])
    logits = decoder.head(decoder.norm(decoder.layout.enter(streams), "norm"))
    return logits if accepted is not None else mb.reshape(x=logits, shape=[kept, gamma, -1])


def _kept_ids(kept: Nodes, selection, parents):
    if selection is not None:
        return mb.cast(x=kept.ids, dtype="int32")
    # Without pruning the ids are constant, and a function must not return a constant.
    return mb.add(x=mb.mul(x=parents, y=np.int32(0)), y=np.arange(kept.count, dtype=np.int32))
