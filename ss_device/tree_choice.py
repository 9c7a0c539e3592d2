"""Choices at the nodes of a draft tree made outside the model: sampling, and typical acceptance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ss_device.sampling import Sampler
from ss_device.tree import DraftTree


def choose_on_tree(
    sampler: Sampler, tree: DraftTree, text: Sequence[int], kept: np.ndarray, logits: np.ndarray
) -> np.ndarray:
    """The token chosen at each kept node, int32 [K']; −1 at nodes that the walk does not reach.

    text: token ids up to and with the root. kept: ascending node ids; logits [K', V] of these. A lossy
    sampler first takes the longest path of typical drafted tokens below a node; where that ends, as
    everywhere without one, the token is drawn, and the walk goes on where it was drafted.
    """
    choices = _Choices(sampler, tree, list(text), kept, logits)
    lossy = getattr(sampler, "lossy_typical", None) is not None
    chosen = np.full(len(kept), -1, np.int32)
    node, path = 0, []
    while True:
        for following in choices.longest_typical(node, path) if lossy else ():
            chosen[choices.row[node]] = tree.tokens[following]
            path.append(int(tree.tokens[following]))
            node = following
        token = chosen[choices.row[node]] = sampler(choices.logits_of(node), choices.text + path)
        drawn = [c for c in choices.children(node) if tree.tokens[c] == token]
        if not drawn:
            return chosen
        node = drawn[0]
        path.append(int(token))


class _Choices:
    """One tree with the logits of its kept nodes. row: of a kept node in them."""

    def __init__(self, sampler, tree, text, kept, logits) -> None:
        self._sampler, self._tree, self._logits = sampler, tree, logits
        self.text, self.row = text, {int(node): row for row, node in enumerate(kept)}

    def logits_of(self, node: int) -> np.ndarray:
        return self._logits[self.row[node]]

    def children(self, node: int) -> list[int]:
        """The kept ones."""
        return [c for c in self._tree.children(node) if c in self.row]

    def longest_typical(self, start: int, path: Sequence[int]) -> list[int]:
        """Nodes below `start`, which lies at `path` below the root, on the longest path of typical tokens.

        Among paths of one length the likeliest, then the one whose nodes come first (Medusa).
        """
        best, pending = (0, 0.0, []), [(start, list(path), 0.0, [])]
        while pending:
            node, tokens, likelihood, nodes = pending.pop()
            if (len(nodes), likelihood) > best[:2] and nodes:
                best = (len(nodes), likelihood, nodes)
            children = self.children(node)
            drafted = [int(self._tree.tokens[c]) for c in children]
            typical = self._sampler.typical(self.logits_of(node), self.text + tokens, drafted)
            for child, token in reversed(list(zip(children, drafted, strict=True))):
                if token in typical:
                    pending.append((child, [*tokens, token], likelihood + typical[token], [*nodes, child]))
        return best[2]
