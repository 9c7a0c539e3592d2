"""The greedy walk inside the graph (docs/method.md, Walk)."""

from __future__ import annotations

import numpy as np
from coremltools.converters.mil import Builder as mb

from ss_convert.coreml.selection import as_number, column, row, row_sums, select
from ss_convert.coreml.tree_inputs import Nodes


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
