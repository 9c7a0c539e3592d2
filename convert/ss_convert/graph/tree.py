"""The draft tree inside the graph: matrices, pruning, the greedy walk (docs/method.md, One decoding step).

Index vectors are one-hot matrices, so that rows are moved by products instead of gathers. Every sum has one
term that is not zero: a selection is exact in any precision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ss_convert.graph.interface import MASKED
from ss_convert.graph.layers import Decoder, split
from ss_convert.graph.operations import op
from ss_convert.graph.options import GraphOptions
from ss_device.config import SpeculativeConfig


def one_hot(indices, width: int):
    """int32 [n] → fp16 [n, width]; an index outside 0..width-1 gives a row of zeros."""
    columns = np.arange(width, dtype=np.int32)[None]
    equal = op.equal(op.expand_dims(indices, axes=[1]), columns)
    return op.to_float(equal)


def column(vector):
    """[n] → [n, 1]."""
    return op.expand_dims(vector, axes=[1])


def row(vector):
    """[n] → [1, n]."""
    return op.expand_dims(vector, axes=[0])


def row_sums(matrix):
    """[n, m] → [n]."""
    return op.reduce_sum(matrix, axes=[-1], keep_dims=False)


def select(selection, rows):
    """One-hot [k, n] of rows [n, w] → [k, w]; without a selection the rows themselves."""
    return rows if selection is None else op.matmul(selection, rows)


def as_number(condition):
    """bool → fp16 0 or 1."""
    return op.to_float(condition)


@dataclass(frozen=True)
class Nodes:
    """Nodes of a tree, all of them (n = N) or the kept ones (n = K). fp16.

    parents [n, n] one-hot (zero rows: root and padding); ancestors [n, n] 0/1, self included; ids [n]
    node ids; mask_prefix [n, C] and mask_nodes [n, n] additive.
    """

    parents: object
    ancestors: object
    ids: object
    mask_prefix: object
    mask_nodes: object

    @property
    def count(self) -> int:
        return self.parents.shape[0]


def read_nodes(inputs: dict, num_nodes: int, context: int) -> Nodes:
    """The nodes described by the step function's inputs; a part may have no use for `parents`."""
    parents = inputs.get("parents")
    mask_prefix, mask_nodes = split(inputs["mask"], [context, num_nodes], axis=1)
    return Nodes(
        parents=None if parents is None else one_hot(parents, num_nodes),
        ancestors=as_number(op.greater(mask_nodes, np.float16(MASKED / 2))),
        ids=np.arange(num_nodes, dtype=np.float16),
        mask_prefix=mask_prefix,
        mask_nodes=mask_nodes,
    )


def within_window(nodes: Nodes, positions, window: int | None) -> Nodes:
    """The nodes with the masks of layers that see `window` positions, their own included (None: all).

    positions int32 [n]. Slot s of the prefix holds position s.
    """
    if window is None:
        return nodes
    slots = np.arange(nodes.mask_prefix.shape[1], dtype=np.int32)
    return replace(
        nodes,
        mask_prefix=op.add(nodes.mask_prefix, outside_window(positions, slots[None], window)),
        mask_nodes=op.add(
            nodes.mask_nodes,
            outside_window(positions, op.expand_dims(positions, axes=[0]), window),
        ),
    )


def outside_window(positions, keys, window: int):
    """Additive mask [n, m] of keys at positions [1, m] that lie `window` or more behind positions [n].

    Compared as integers: fp16 holds positions exactly only up to 2048.
    """
    behind = op.sub(op.expand_dims(positions, axes=[1]), keys)
    far = op.greater_equal(behind, np.int32(window))
    return op.mul(as_number(far), np.float16(MASKED))


def keep_nodes(nodes: Nodes, selection) -> Nodes:
    """The nodes that a one-hot selection [K, N] names, in its order."""

    def among_kept(matrix):
        return op.matmul(select(selection, matrix), selection, transpose_y=True)

    return Nodes(
        parents=None if nodes.parents is None else among_kept(nodes.parents),
        ancestors=among_kept(nodes.ancestors),
        ids=row_sums(op.mul(selection, nodes.ids[None])),
        mask_prefix=select(selection, nodes.mask_prefix),
        mask_nodes=among_kept(nodes.mask_nodes),
    )


# Below any node's score, so that padding never displaces a node.
PADDING_SCORE = -3e4


def kept_selection(
    decoder: Decoder, config: SpeculativeConfig, options: GraphOptions, hidden, tokens, nodes: Nodes
):
    """One-hot [K, N] of the kept nodes, ids ascending.

    hidden: rows of the N nodes at the first MSA layer's input; tokens int32 [N]; nodes: all of the tree.
    """
    is_draft = row_sums(nodes.parents)  # 1 for every real node but the root
    log_probs = draft_log_probs(decoder, config, options.prune_over, hidden, tokens, is_draft)
    # Edge of child c: the log-probability of its token at its parent, L[parent(c), c].
    edges = row_sums(op.mul(nodes.parents, op.transpose(log_probs, perm=[1, 0])))
    scores = row_sums(op.mul(nodes.ancestors, row(edges)))
    return keep_best_nodes(op.add(scores, padding_scores(is_draft, nodes.count)), options.num_kept)


def draft_log_probs(decoder: Decoder, config, prune_over: str, hidden, tokens, is_draft):
    """log p(token of node u | node p) by the early exit, [N, N] with p as row.

    z̃ = norm_f(M + B·A·M); a product with the N tokens' head rows replaces the LM head, unless the
    normaliser runs over V. `draft` counts a token as often as it stands in the tree.
    """
    if config.pruning_rank:
        a, b = decoder.weights.part("pruning.a"), decoder.weights.part("pruning.b")
        hidden = op.add(hidden, decoder.low_rank("pruning", hidden, a, b))
    normed = decoder.norm(hidden, "norm")
    logits = decoder.head_at(normed, tokens)
    if prune_over == "vocabulary":
        return op.sub(logits, log_sum_exp(decoder.head(normed)))
    others = op.mul(op.sub(is_draft, np.float16(1)), np.float16(-MASKED))
    return op.sub(logits, log_sum_exp(op.add(logits, row(others))))


def log_sum_exp(x):
    """[n, m] → [n, 1], shifted by the row's maximum so that no exponential overflows."""
    largest = op.reduce_max(x, axes=[-1], keep_dims=True)
    total = op.reduce_sum(op.exp(op.sub(x, largest)), axes=[-1], keep_dims=True)
    return op.add(largest, op.log(total))


def padding_scores(is_draft, count: int):
    """[N]: 0 for the root and every drafted node, PADDING_SCORE for padding."""
    root = np.eye(1, count, dtype=np.float16)[0]
    is_padding = op.sub(np.ones(count, np.float16) - root, is_draft)
    return op.mul(is_padding, np.float16(PADDING_SCORE))


def keep_best_nodes(scores, keep: int):
    """One-hot [keep, N] of the highest scores [N], indices ascending, ties to the lower index.

    A node's rank is the number of nodes that go before it; comparisons instead of a top-k make the
    ties' order part of the graph.
    """
    count = scores.shape[0]
    ahead = op.greater(row(scores), column(scores))
    tie = op.equal(row(scores), column(scores))
    lower_index = np.tril(np.ones((count, count), dtype=np.float16), -1)
    before = op.add(as_number(ahead), op.mul(as_number(tie), lower_index))
    kept = as_number(op.less(row_sums(before), np.float16(keep)))
    place = row_sums(op.mul(row(kept), lower_index))
    targets = np.arange(keep, dtype=np.float16)[:, None]
    return op.mul(as_number(op.equal(row(place), targets)), row(kept))


def accepted_row(tokens, nodes: Nodes, selection, chosen):
    """One-hot [1, K] of the kept node where the walk ends.

    tokens int32 [N] of all nodes; nodes: the kept ones; selection: one-hot [K, N] or None (K = N);
    chosen int32 [K].

    A node is right when its token is the one chosen at its parent and no earlier sibling is; it is
    reached when it and all its ancestors are right; the walk ends at the deepest reached node.
    """
    count = nodes.count
    root = np.eye(1, count, dtype=np.float16)[0]
    # Tokens are compared as integers: ids beyond 2048 are not exact in fp16.
    matches = as_number(op.equal(column(tokens), row(chosen)))
    right = row_sums(op.mul(nodes.parents, select(selection, matches)))
    right = op.mul(right, _first_sibling(nodes.parents, right, count))
    right = op.add(right, root)
    depth = row_sums(nodes.ancestors)
    reached = op.equal(row_sums(op.mul(nodes.ancestors, row(right))), depth)
    score = op.mul(as_number(reached), depth)
    # Reached nodes form one path, so exactly one has the largest depth and no argmax (CPU) is needed.
    deepest = op.reduce_max(row(score), axes=[-1], keep_dims=True)
    return as_number(op.equal(row(score), deepest))


def _first_sibling(parents, right, count: int):
    """[K]: 1 unless an earlier sibling is right too (a draft may hold the same token twice)."""
    siblings = op.matmul(parents, parents, transpose_y=True)
    earlier = np.tril(np.ones((count, count), dtype=np.float16), -1)
    rivals = row_sums(op.mul(op.mul(siblings, earlier), row(right)))
    return as_number(op.less(rivals, np.float16(0.5)))
