"""Early-exit pruning inside the graph: node scores, the best K nodes (docs/method.md, Pruning)."""

from __future__ import annotations

import numpy as np
from coremltools.converters.mil import Builder as mb

from ss_convert.coreml.interface import MASKED
from ss_convert.coreml.layers import Decoder
from ss_convert.coreml.options import CoreMLOptions
from ss_convert.coreml.selection import as_number, column, row, row_sums
from ss_convert.coreml.tree_inputs import Nodes
from ss_device.config import SpeculativeConfig

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
    return best_rows(mb.add(x=scores, y=padding_scores(is_draft, nodes.count)), options.num_kept)


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


def best_rows(scores, keep: int):
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
