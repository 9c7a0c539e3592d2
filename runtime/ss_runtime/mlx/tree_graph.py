"""The parts of a decoding step that act on the tree, as array operations inside the graph.

Nothing here reads a value back: shapes are static, counts and positions are arrays, so a step is
compiled once per tree size and stays on the device until its outcome is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class TreeArrays:
    """A draft tree on the device, padded to N nodes that see only themselves.

    tokens, parents, depths: int32 [N] (the root's parent is -1); ancestors: bool [N, N], row sees
    column; num_real: int32 [1], nodes that are not padding.
    """

    tokens: mx.array
    parents: mx.array
    depths: mx.array
    ancestors: mx.array
    num_real: mx.array

    @property
    def size(self) -> int:
        return self.tokens.shape[0]

    def keep(self, kept: mx.array) -> TreeArrays:
        """The sub-tree of `kept` [K] (ascending, closed under ancestors), with its own node ids."""
        parents = self.parents[kept]
        rank = mx.sum(kept[None, :] < parents[:, None], axis=1).astype(mx.int32)
        return TreeArrays(
            tokens=self.tokens[kept],
            parents=mx.where(parents < 0, parents, rank),
            depths=self.depths[kept],
            ancestors=self.ancestors[kept][:, kept],
            num_real=mx.sum(kept[None, :] < self.num_real, axis=1),
        )


def stream_mask(ancestors: mx.array, num_streams: int, main_attends_streams: bool) -> mx.array:
    """Who sees whom among [main 0..K-1 | (0,1)…(0,γ) | (1,1)…] (docs/method.md, Mask rules).

    ancestors: bool [K, K] → bool [K·(1+γ), K·(1+γ)]. Stream (i, j) sees what main i sees and the
    streams (i, j' ≤ j); main i sees its own streams only with `main_attends_streams`.
    """
    size, count = ancestors.shape[0], num_streams
    own = mx.eye(size, dtype=mx.bool_)
    to_streams = mx.repeat(own, count, axis=1)
    if not main_attends_streams:
        to_streams = mx.zeros_like(to_streams)
    order = mx.tile(mx.tri(count, dtype=mx.bool_), (size, size))
    among = mx.repeat(mx.repeat(own, count, axis=0), count, axis=1) & order
    streams = mx.concatenate([mx.repeat(ancestors, count, axis=0), among], axis=1)
    return mx.concatenate([mx.concatenate([ancestors, to_streams], axis=1), streams], axis=0)


def cache_mask(rows: mx.array, length: mx.array, start: mx.array, capacity: int) -> mx.array:
    """Attention mask over a whole key buffer.

    rows: bool [R, S], what each row sees of the S slots from `start` [1] on. Every row also sees the
    committed slots 0..length-1; length: int32 [1]. → bool [R, capacity].
    """
    committed = mx.arange(capacity)[None, :] < length
    seen = mx.broadcast_to(committed, (rows.shape[0], capacity))
    return mx.slice_update(seen, rows, start, (1,))


def slot_positions(rows: mx.array, start: mx.array, capacity: int) -> mx.array:
    """Position of what stands in each slot of a key buffer, int32 [capacity].

    Committed slot s holds position s; the slots from `start` [1] on hold `rows` [R].
    """
    return mx.slice_update(mx.arange(capacity), rows.astype(mx.int32), start, (0,))


def node_scores(tree: TreeArrays, edges: mx.array) -> mx.array:
    """Path log-probability of each node: its ancestors' edges and its own. float32 [N].

    edges: [N], log-probability of each node given its parent. Padding scores -inf. Every row is
    summed in the same order and a child only adds terms ≤ 0, so rounding never lets it pass its parent.
    """
    nodes = mx.arange(tree.size)
    real = nodes < tree.num_real
    edges = mx.where((nodes > 0) & real, edges.astype(mx.float32), 0.0)
    scores = mx.sum(mx.where(tree.ancestors, edges[None, :], 0.0), axis=1)
    return mx.where(real, scores, -mx.inf)


def keep_best_nodes(scores: mx.array, keep: int) -> mx.array:
    """Ids (ascending) of the `keep` best of `scores` [N]; ties go to the lower index. int32 [keep].

    Ranks by counting: array sorts promise no order among equals on every device.
    """
    nodes = mx.arange(scores.shape[0])
    mine, other = scores[:, None], scores[None, :]
    before = (other > mine) | ((other == mine) & (nodes[None, :] < nodes[:, None]))
    kept = mx.sum(before, axis=1) < keep
    return mx.sort(mx.where(kept, nodes, scores.shape[0]))[:keep].astype(mx.int32)


def accepted_row(tree: TreeArrays, chosen: mx.array) -> mx.array:
    """Where the greedy walk ends (docs/method.md, Walk). int32 [1].

    chosen: [K], the model's own next token at each node. A node is reached when it and its ancestors
    are each what was chosen at their parent; the deepest reached one is accepted. Of two equal
    siblings the walk takes the first.
    """
    nodes = mx.arange(tree.size)
    same = (tree.parents[:, None] == tree.parents[None, :]) & (tree.tokens[:, None] == tree.tokens[None, :])
    repeated = mx.any(same & (nodes[None, :] < nodes[:, None]), axis=1)
    followed = (tree.tokens == chosen[mx.maximum(tree.parents, 0)]) & ~repeated
    followed = (followed & (nodes < tree.num_real)) | (nodes == 0)
    reached = mx.all(followed[None, :] | ~tree.ancestors, axis=1)
    return mx.argmax(mx.where(reached, tree.depths, -1), keepdims=True).astype(mx.int32)
