"""The draft tree inside the graph: matrices, pruning, the greedy walk (docs/method.md, One decoding step).

Index vectors are one-hot matrices, so that rows are moved by products instead of gathers. Every sum has one
term that is not zero: a selection is exact in any precision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from coremltools.converters.mil import Builder as mb

from ss_convert.coreml.interface import MASKED
from ss_convert.coreml.layers import Decoder, split
from ss_convert.coreml.options import CoreMLOptions
from ss_device.config import SpeculativeConfig


def one_hot(indices, width: int):
    """int32 [n] → fp16 [n, width]; an index outside 0..width-1 gives a row of zeros."""
    columns = np.arange(width, dtype=np.int32)[None]
    equal = mb.equal(x=mb.expand_dims(x=indices, axes=[1]), y=columns)
    return mb.cast(x=equal, dtype="fp16")


def column(vector):
    """[n] → [n, 1]."""
    return mb.expand_dims(x=vector, axes=[1])


def row(vector):
    """[n] → [1, n]."""
    return mb.expand_dims(x=vector, axes=[0])


def row_sums(matrix):
    """[n, m] → [n]."""
    return mb.reduce_sum(x=matrix, axes=[-1], keep_dims=False)


def select(selection, rows):
    """One-hot [k, n] of rows [n, w] → [k, w]; without a selection the rows themselves."""
    return rows if selection is None else mb.matmul(x=selection, y=rows)


def as_number(condition):
    """bool → fp16 0 or 1."""
    return mb.cast(x=condition, dtype="fp16")


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
        ancestors=as_number(mb.greater(x=mask_nodes, y=np.float16(MASKED / 2))),
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
        mask_prefix=mb.add(x=nodes.mask_prefix, y=outside_window(positions, slots[None], window)),
        mask_nodes=mb.add(
            x=nodes.mask_nodes,
            y=outside_window(positions, mb.expand_dims(x=positions, axes=[0]), window),
        ),
    )


def outside_window(positions, keys, window: int):
    """Additive mask [n, m] of keys at positions [1, m] that lie `window` or more behind positions [n].

    Compared as integers: fp16 holds positions exactly only up to 2048.
    """
    behind = mb.sub(x=mb.expand_dims(x=positions, axes=[1]), y=keys)
    far = mb.greater_equal(x=behind, y=np.int32(window))
    return mb.mul(x=as_number(far), y=np.float16(MASKED))


def keep_nodes(nodes: Nodes, selection) -> Nodes:
    """The nodes that a one-hot selection [K, N] names, in its order."""

    def among_kept(matrix):
        return mb.matmul(x=select(selection, matrix), y=selection, transpose_y=True)

    return Nodes(
        parents=None if nodes.parents is None else among_kept(nodes.parents),
        ancestors=among_kept(nodes.ancestors),
        ids=row_sums(mb.mul(x=selection, y=nodes.ids[None])),
        mask_prefix=select(selection, nodes.mask_prefix),
        mask_nodes=among_kept(nodes.mask_nodes),
    )


# Below any node's score, so that padding never displaces a node.
PADDING_SCORE = -3e4


def kept_selection(
    decoder: Decoder, config: SpeculativeConfig, options: CoreMLOptions, hidden, tokens, nodes: Nodes
):
    """One-hot [K, N] of the kept nodes, ids ascending.

    hidden: rows of the N nodes at the first MSA layer's input; tokens int32 [N]; nodes: all of the tree.
    """
    is_draft = row_sums(nodes.parents)  # 1 for every real node but the root
    log_probs = draft_log_probs(decoder, config, options.prune_over, hidden, tokens, is_draft)
    # Edge of child c: the log-probability of its token at its parent, L[parent(c), c].
    edges = row_sums(mb.mul(x=nodes.parents, y=mb.transpose(x=log_probs, perm=[1, 0])))
    scores = row_sums(mb.mul(x=nodes.ancestors, y=row(edges)))
    return keep_best_nodes(mb.add(x=scores, y=padding_scores(is_draft, nodes.count)), options.num_kept)


def draft_log_probs(decoder: Decoder, config, prune_over: str, hidden, tokens, is_draft):
    """log p(token of node u | node p) by the early exit, [N, N] with p as row.

    z̃ = norm_f(M + B·A·M); a product with the N tokens' head rows replaces the LM head, unless the
    normaliser runs over V. `draft` counts a token as often as it stands in the tree.
    """
    if config.pruning_rank:
        a, b = decoder.weights.part("pruning.a"), decoder.weights.part("pruning.b")
        hidden = mb.add(x=hidden, y=decoder.low_rank("pruning", hidden, a, b))
    normed = decoder.norm(hidden, "norm")
    logits = decoder.head_at(normed, tokens)
    if prune_over == "vocabulary":
        return mb.sub(x=logits, y=log_sum_exp(decoder.head(normed)))
    others = mb.mul(x=mb.sub(x=is_draft, y=np.float16(1)), y=np.float16(-MASKED))
    return mb.sub(x=logits, y=log_sum_exp(mb.add(x=logits, y=row(others))))


def log_sum_exp(x):
    """[n, m] → [n, 1], shifted by the row's maximum so that no exponential overflows."""
    largest = mb.reduce_max(x=x, axes=[-1], keep_dims=True)
    total = mb.reduce_sum(x=mb.exp(x=mb.sub(x=x, y=largest)), axes=[-1], keep_dims=True)
    return mb.add(x=largest, y=mb.log(x=total))


def padding_scores(is_draft, count: int):
    """[N]: 0 for the root and every drafted node, PADDING_SCORE for padding."""
    root = np.eye(1, count, dtype=np.float16)[0]
    is_padding = mb.sub(x=np.ones(count, np.float16) - root, y=is_draft)
    return mb.mul(x=is_padding, y=np.float16(PADDING_SCORE))


def keep_best_nodes(scores, keep: int):
    """One-hot [keep, N] of the highest scores [N], indices ascending, ties to the lower index.

    A node's rank is the number of nodes that go before it; comparisons instead of a top-k make the
    ties' order part of the graph.
    """
    count = scores.shape[0]
    ahead = mb.greater(x=row(scores), y=column(scores))
    tie = mb.equal(x=row(scores), y=column(scores))
    lower_index = np.tril(np.ones((count, count), dtype=np.float16), -1)
    before = mb.add(x=as_number(ahead), y=mb.mul(x=as_number(tie), y=lower_index))
    kept = as_number(mb.less(x=row_sums(before), y=np.float16(keep)))
    place = row_sums(mb.mul(x=row(kept), y=lower_index))
    targets = np.arange(keep, dtype=np.float16)[:, None]
    return mb.mul(x=as_number(mb.equal(x=row(place), y=targets)), y=row(kept))


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
    matches = as_number(mb.equal(x=column(tokens), y=row(chosen)))
    right = row_sums(mb.mul(x=nodes.parents, y=select(selection, matches)))
    right = mb.mul(x=right, y=_first_sibling(nodes.parents, right, count))
    right = mb.add(x=right, y=root)
    depth = row_sums(nodes.ancestors)
    reached = mb.equal(x=row_sums(mb.mul(x=nodes.ancestors, y=row(right))), y=depth)
    score = mb.mul(x=as_number(reached), y=depth)
    # Reached nodes form one path, so exactly one has the largest depth and no argmax (CPU) is needed.
    deepest = mb.reduce_max(x=row(score), axes=[-1], keep_dims=True)
    return as_number(mb.equal(x=row(score), y=deepest))


def _first_sibling(parents, right, count: int):
    """[K]: 1 unless an earlier sibling is right too (a draft may hold the same token twice)."""
    siblings = mb.matmul(x=parents, y=parents, transpose_y=True)
    earlier = np.tril(np.ones((count, count), dtype=np.float16), -1)
    rivals = row_sums(mb.mul(x=mb.mul(x=siblings, y=earlier), y=row(right)))
    return as_number(mb.less(x=rivals, y=np.float16(0.5)))
