"""`<app>_step`: verify a draft tree and write the next draft (docs/method.md, One decoding step)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ss_convert.graph.cache import Cache, open_cache, stack_rows
from ss_convert.graph.layers import Decoder, View, gather_tables, split_rotary
from ss_convert.graph.operations import op
from ss_convert.graph.options import GraphOptions
from ss_convert.graph.parts import split_layers
from ss_convert.graph.prefill_function import plain_layer
from ss_convert.graph.streams import StreamLayers
from ss_convert.graph.tables import stream_offsets
from ss_convert.graph.tree import (
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


@dataclass(frozen=True)
class _Tree:
    """The tree of a step: all nodes, or the kept ones.

    tokens, positions: int32 [N] of all nodes, None where a part takes none; seen: the nodes by window, with
    its masks; rotary, stream_rotary: rotary rows of all nodes and of their streams by window.
    """

    tokens: object
    positions: object
    nodes: Nodes
    seen: dict[int | None, Nodes]
    rotary: dict
    stream_rotary: dict

    def kept(self, selection) -> _Tree:
        """The nodes of a one-hot selection [K, N]; None: all."""
        if selection is None:
            return self
        nodes = keep_nodes(self.nodes, selection)
        seen = {window: keep_nodes(every, selection) for window, every in self.seen.items()}
        return replace(self, nodes=nodes, seen=seen)


def build_step(
    decoder: Decoder, config: SpeculativeConfig, options: GraphOptions, rotary_tables: dict, inputs: dict
) -> dict:
    """The function's body; `inputs` as in `interface.step_inputs`, plus `kv_cache`. → outputs by name.

    rotary_tables: `tables.rotary_tables` of the part's windows. A part without MSA layers hands on the
    states of all nodes, one with them those of the kept nodes and their streams.
    """
    part, layers = decoder.part, StreamLayers(decoder, config, options.num_kept)
    cache = _committed_cache(decoder, options, inputs, layers.first_msa_layer)
    below, above = split_layers(part, layers.first_msa_layer)
    tree = _read_tree(config, options, rotary_tables, inputs, has_streams=bool(above))
    hidden, lower = _lower_layers(decoder, below, inputs, tree, cache)
    if not above:
        cache.write_scratch(stack_rows(lower, options.num_nodes))
        return {"hidden": decoder.layout.leave(hidden)} | cache.outputs()
    selection = _selection(layers, options, inputs, tree, hidden) if options.prunes else None
    tree = tree.kept(selection)
    rows, upper = _upper_layers(layers, above, inputs, tree, selection, hidden, cache)
    cache.write_scratch(stack_rows(lower + upper, options.num_nodes))
    if part.is_last:
        return _outputs(layers, options, inputs, tree, selection, rows) | cache.outputs()
    passed = {"hidden": decoder.layout.leave(rows)} | cache.outputs()
    return passed | ({"kept": op.to_int(tree.nodes.ids)} if options.prunes else {})


def _committed_cache(decoder: Decoder, options: GraphOptions, inputs: dict, first_msa_layer: int) -> Cache:
    """The cache, the rows that the previous step accepted moved to their slots."""
    cache = open_cache(inputs, decoder.architecture, decoder.part, options)
    committed = (inputs.get("commit_nodes"), inputs.get("commit_rows"))
    cache.commit(inputs.get("commit_position"), *committed, first_msa_layer)
    return cache


def _read_tree(
    config: SpeculativeConfig, options: GraphOptions, rotary_tables: dict, inputs: dict, has_streams: bool
) -> _Tree:
    """The tree that the inputs describe; has_streams: whether the part has MSA layers."""
    positions = inputs.get("positions")
    tokens = op.squeeze(inputs["tokens"], axes=[0]) if "tokens" in inputs else None
    nodes = read_nodes(inputs, options.num_nodes, options.context)
    return _Tree(
        tokens=tokens,
        positions=positions,
        nodes=nodes,
        seen={window: within_window(nodes, positions, window) for window in rotary_tables},
        rotary=gather_tables(rotary_tables, positions),
        stream_rotary=_stream_tables(rotary_tables, positions, config) if has_streams else {},
    )


def _lower_layers(decoder: Decoder, layers: range, inputs: dict, tree: _Tree, cache: Cache):
    """Layers on all nodes → (states [N, h], per layer the keys and values)."""
    views = {
        window: View(_node_mask(inputs, nodes, window), split_rotary(tree.rotary[window]))
        for window, nodes in tree.seen.items()
    }
    if decoder.part.is_first:
        hidden = decoder.embed(tree.tokens, tree.positions)
    else:
        hidden = decoder.layout.enter(inputs["previous_hidden"])
    keys_values = []
    for layer in layers:
        hidden, new = plain_layer(decoder, layer, hidden, views, cache)
        keys_values.append(new)
    return hidden, keys_values


def _node_mask(inputs: dict, nodes: Nodes, window: int | None):
    if window is None:
        return inputs["mask"]
    return op.concat([nodes.mask_prefix, nodes.mask_nodes], axis=1)


def _selection(layers: StreamLayers, options: GraphOptions, inputs: dict, tree: _Tree, hidden):
    """One-hot [K, N] of the nodes that early-exit pruning keeps, here or in an earlier part."""
    if _starts_streams(layers):
        return kept_selection(layers.decoder, layers.config, options, hidden, tree.tokens, tree.nodes)
    return one_hot(inputs["previous_kept"], options.num_nodes)


def _starts_streams(layers: StreamLayers) -> bool:
    """Whether the first MSA layer is in this part, not in an earlier one."""
    return layers.decoder.part.first <= layers.first_msa_layer


def _upper_layers(
    layers: StreamLayers, indices: range, inputs: dict, tree: _Tree, selection, hidden, cache: Cache
):
    """MSA layers on the kept nodes and their streams → (rows, per layer the kept nodes' keys and values).

    hidden: states of all nodes at the first MSA layer's input, or the rows of the part before.
    """
    decoder, config, gate = layers.decoder, layers.config, inputs.get("stream_gate")
    rotary = _with_streams(tree.rotary, tree.stream_rotary, config, selection)
    views = {w: View(layers.mask(n, gate), split_rotary(rotary[w])) for w, n in tree.seen.items()}
    if _starts_streams(layers):
        step = _position_step(decoder, tree.positions, config, selection)
        hidden = layers.start(select(selection, decoder.layout.leave(hidden)), step)
    return layers.run(hidden, indices, cache, views)


def _outputs(
    layers: StreamLayers, options: GraphOptions, inputs: dict, tree: _Tree, selection, rows
) -> dict:
    """What the whole function returns, from the rows behind the last layer."""
    decoder, nodes = layers.decoder, tree.nodes
    logits = decoder.head(decoder.norm(layers.main_rows(rows), "norm"))
    chosen = op.reduce_argmax(logits, axis=-1)
    accepted = accepted_row(tree.tokens, nodes, selection, chosen)
    outputs = {"logits": logits} if options.sampling else {}
    return outputs | {
        "kept": _kept_ids(nodes, selection, inputs["parents"]),
        "chosen": chosen,
        "accepted": op.to_int(row_sums(op.mul(accepted, nodes.ids))),
        "stream_logits": _stream_logits(decoder, layers, rows, None if options.sampling else accepted),
    }


def _stream_positions(positions, config: SpeculativeConfig):
    """int32 [N·γ]: positions of all nodes' streams, node by node."""
    offsets = stream_offsets(config)[None]
    return op.reshape(op.add(op.expand_dims(positions, axes=[1]), offsets), shape=[-1])


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
        return op.concat(values, axis=0)

    done = {id(rows): joined(rows, ahead[w]) for w, rows in rotary.items() if rows is not None}
    return {window: done.get(id(rows)) for window, rows in rotary.items()}


def _position_step(decoder: Decoder, positions, config: SpeculativeConfig, selection):
    """Learned positions: what moves each stream from its node's position to its own, [K·γ, h]."""
    if decoder.architecture.positions != "learned":
        return None
    there = decoder.learned(_stream_positions(positions, config))
    here = op.expand_dims(decoder.learned(positions), axes=[1])
    width = there.shape[1]
    there = op.reshape(there, shape=[-1, config.num_streams, width])
    step = op.reshape(op.sub(there, here), shape=[-1, width])
    return _select_streams(step, config, selection)


def _select_streams(rows, config: SpeculativeConfig, selection):
    """Rows [N·γ, w] of all nodes' streams → [K·γ, w] of the kept ones."""
    width = rows.shape[1]
    by_node = op.reshape(rows, shape=[-1, config.num_streams * width])
    return op.reshape(select(selection, by_node), shape=[-1, width])


def _stream_logits(decoder: Decoder, layers: StreamLayers, rows, accepted):
    """[γ, V] of one node; its rows are selected first, so that the head runs on γ rows, not K·γ.

    accepted None: [K, γ, V] of every kept node, for a host whose own walk may end at any of them.
    """
    gamma, streams = layers.config.num_streams, layers.stream_rows(rows)
    kept, width = streams.shape
    if accepted is not None:
        streams = op.matmul(accepted, streams)
    streams = op.reshape(streams, shape=[-1, width // gamma])
    logits = decoder.head(decoder.norm(decoder.layout.enter(streams), "norm"))
    return logits if accepted is not None else op.reshape(logits, shape=[kept, gamma, -1])


def _kept_ids(kept: Nodes, selection, parents):
    if selection is not None:
        return op.to_int(kept.ids)
    # Without pruning the ids are constant, and a function must not return a constant.
    return op.add(op.mul(parents, np.int32(0)), np.arange(kept.count, dtype=np.int32))
