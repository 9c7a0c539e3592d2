"""One decoding step over a StreamDecoder as array operations, for the step model and for exported files.

Nothing here reads a value back, and nothing owns a buffer: `Layers` come in as a list whose entries are
replaced. How many slots a pass reads, and who sees the committed text, is the caller's (`TextMask`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from ss_runtime.mlx.decoder import StreamDecoder
from ss_runtime.mlx.kv_cache import Layers
from ss_runtime.mlx.layers import Rows
from ss_runtime.mlx.tree_graph import (
    TreeArrays,
    accepted_row,
    cache_mask,
    keep_best_nodes,
    node_scores,
    slot_positions,
    stream_mask,
)

# Kept node ids [K], their logits [K, V] → chosen tokens int32 [K].
Decide = Callable[[mx.array, mx.array], mx.array]


def argmax_tokens(kept: mx.array, logits: mx.array) -> mx.array:
    """The likeliest token of every node: logits [K, V] → int32 [K]."""
    return mx.argmax(logits, axis=-1).astype(mx.int32)


@dataclass(frozen=True)
class TextMask:
    """Who sees the committed text: every row, all of it.

    length: int32 [1], tokens of the text, so also the slot behind it, where a pass writes its rows; slots:
    how many slots of the buffers a pass reads.
    """

    length: mx.array
    slots: int

    def nodes(self, tree: TreeArrays) -> mx.array:
        """Mask bool [N, slots] of a pass over the tree's nodes alone."""
        return self.rows(tree.ancestors)

    def rows(self, among: mx.array) -> mx.array:
        """Mask bool [R, slots] of a pass over nodes, then streams. among: bool [R, R], row sees column."""
        return cache_mask(among, self.length, self.length, self.slots)

    def keep(self, kept: mx.array) -> TextMask:
        """That of the nodes `kept` [K] alone."""
        return self


@dataclass(frozen=True, eq=False)
class StepGraph:
    """A decoding step (docs/method.md, One decoding step). Settings as in `MLXStepModel`."""

    decoder: StreamDecoder
    num_kept: int
    prune_over: str
    stream_rows: str

    @property
    def leaders(self) -> int:
        """Main rows that a pass over one node's streams takes along."""
        return int(self.decoder.config.stream_top_keys > 0)

    def scratch_rows(self, size: int) -> int:
        """Buffer slots that a step of `size` nodes writes."""
        kept, streams = min(size, self.num_kept), self.decoder.config.num_streams
        rows = {"kept": kept * (1 + streams), "accepted": kept + self.leaders + streams}
        return max(size, rows.get(self.stream_rows, 0))

    def prompt_chunk(self, tokens: mx.array, length: mx.array, mask: mx.array, kv: Layers) -> None:
        """Write the rows of prompt tokens [P] that carry no streams. mask: bool [P, slots]."""
        decoder, positions = self.decoder, length + mx.arange(tokens.shape[0])
        rows = decoder.rows(positions, tokens.shape[0], mask, length)
        decoder.run_layers(decoder.embed_rows(tokens, positions), 0, len(kv), rows, kv)

    def step(
        self,
        tree: TreeArrays,
        text: TextMask,
        kv: Layers,
        decide: Decide = argmax_tokens,
        defer: bool = False,
    ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Verify a tree of N nodes.

        → kept node ids int32 [K], their chosen tokens int32 [K], the accepted node's row among them int32
        [1], its stream logits float32 [γ, V] ([0, V] with stream_rows `none`). With `defer`, instead of
        stream logits the accepted node's row [1, h] at the first MSA layer's input.
        """
        decoder, positions = self.decoder, text.length + tree.depths
        rows = decoder.rows(positions, tree.size, text.nodes(tree), text.length)
        embedded = decoder.embed_rows(tree.tokens, positions)
        main = decoder.run_layers(embedded, 0, decoder.first_msa_layer, rows, kv)
        kept = mx.arange(tree.size)
        if tree.size > self.num_kept:
            edges = decoder.early_exit_edges(main, tree, self.prune_over)
            kept = keep_best_nodes(node_scores(tree, edges), self.num_kept)
            main, tree, text, rows = main[kept], tree.keep(kept), text.keep(kept), None
        if self.stream_rows == "kept":
            logits, streams = self._joint_pass(main, tree, text, kv)
        else:
            logits, streams = self._main_pass(main, tree, text, kv, rows), None
        chosen = decide(kept, logits)
        row = accepted_row(tree, chosen)
        if streams is not None:
            drafted = decoder.logits(streams[row][0])
        else:
            drafted = main[row] if defer else self._separate_pass(main[row], tree, row, text, kv)
        return kept, chosen, row, drafted if defer else drafted.astype(mx.float32)

    def _joint_pass(
        self, main: mx.array, tree: TreeArrays, text: TextMask, kv: Layers
    ) -> tuple[mx.array, mx.array]:
        """MSA layers on all nodes and all their streams at once (the paper's step).

        → logits [K, V] of the nodes, last rows [K, γ, h] of their streams.
        """
        decoder, config, size = self.decoder, self.decoder.config, tree.size
        positions = text.length + tree.depths
        mask = text.rows(stream_mask(tree.ancestors, config.num_streams, config.main_attends_streams))
        anchors = mx.concatenate([positions, mx.repeat(positions, config.num_streams)])
        x = mx.concatenate([main, decoder.start_streams(main, positions)], axis=0)
        positions = mx.concatenate([positions, decoder.stream_positions(positions)])
        rows = decoder.rows(positions, size, mask, text.length, anchors)
        x = decoder.run_layers(x, decoder.first_msa_layer, len(kv), rows, kv)
        return decoder.logits(x[:size]), x[size:].reshape(size, -1, x.shape[-1])

    def _main_pass(
        self, main: mx.array, tree: TreeArrays, text: TextMask, kv: Layers, rows: Rows | None
    ) -> mx.array:
        """MSA layers on the nodes alone: logits [K, V]. rows: of the layers below, None if pruned."""
        decoder = self.decoder
        if rows is None:
            rows = decoder.rows(text.length + tree.depths, tree.size, text.nodes(tree), text.length)
        return decoder.logits(decoder.run_layers(main, decoder.first_msa_layer, len(kv), rows, kv))

    def _separate_pass(
        self, main: mx.array, tree: TreeArrays, row: mx.array, text: TextMask, kv: Layers
    ) -> mx.array:
        """MSA layers on the streams of the accepted node, main [1, h], alone or on none: logits [γ, V]."""
        if self.stream_rows == "none":
            return mx.zeros((0, self.decoder.architecture.vocab_size))
        positions = text.length + tree.depths
        return self.node_streams(main, positions[row], tree.ancestors[row], positions, text, kv)

    def node_streams(
        self,
        main: mx.array,
        here: mx.array,
        seen: mx.array,
        positions: mx.array,
        text: TextMask,
        kv: Layers,
    ) -> mx.array:
        """MSA layers on one node's streams alone, behind the S rows that follow the text: logits [γ, V].

        main [1, h]: the node at the first MSA layer's input, here [1] its position. It sees the committed
        text and `seen` bool [1, S] of those rows, whose positions [S] are given. With `stream_top_keys` it
        goes along: its attention decides in every layer what its streams see, and nobody sees that row.
        """
        decoder, count, gamma = self.decoder, self.leaders, self.decoder.config.num_streams
        among = mx.pad(mx.tri(gamma, dtype=mx.bool_), [(count, 0), (count, 0)])
        among = mx.concatenate([mx.repeat(seen, count + gamma, axis=0), among], axis=1)
        mask = text.rows(among)
        anchors = mx.repeat(here, count + gamma)
        keys = slot_positions(mx.concatenate([positions, anchors]), text.length, text.slots)
        at = mx.concatenate([here[:count], decoder.stream_positions(here)])
        rows = decoder.rows(at, count, mask, text.length + seen.shape[1], anchors, keys)
        x = mx.concatenate([main[:count], decoder.start_streams(main, here)])
        streams = decoder.run_layers(x, decoder.first_msa_layer, len(kv), rows, kv)[count:]
        return decoder.logits(streams)
