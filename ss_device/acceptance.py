"""The walk: which drafted tokens the model itself would have chosen."""

from __future__ import annotations

import numpy as np

from ss_device.tree import DraftTree


def walk(tree: DraftTree, kept: np.ndarray, chosen: np.ndarray) -> list[int]:
    """Node ids of the accepted path, root first (docs/method.md, Walk).

    kept: int [K], ascending node ids that were verified (all of them without pruning); chosen: int
    [K], the token the model chose at each kept node. From the root the walk follows the kept child
    equal to the token chosen at the current node; the last node's chosen token is the next root.
    """
    choice = dict(zip(kept.tolist(), chosen.tolist(), strict=True))
    path = [0]
    while True:
        wanted = choice[path[-1]]
        following = [c for c in tree.children(path[-1]) if c in choice and tree.tokens[c] == wanted]
        if not following:
            return path
        path.append(following[0])
