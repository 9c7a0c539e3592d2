"""Draft trees: construction from stream logits, ancestor mask, paths.

A tree is drawn with its root, the already decided token, as node 0; parents come before children:

    tokens   [ SELECT, name, count, FROM, ( ]        SELECT ─┬─ name ─── FROM
    parents  [     -1,    0,     0,    1, 2 ]                └─ count ── (
    depths   [      0,    1,     1,    2, 2 ]
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np


@dataclass(frozen=True)
class DraftTree:
    """A draft of `num_nodes` tokens. Arrays are int32 [num_nodes]; `parents[0]` is -1."""

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray

    def __post_init__(self) -> None:
        _check_parents(self.parents)
        if not len(self.tokens) == len(self.parents) == len(self.depths):
            raise ValueError("a tree has as many tokens as parents and depths")
        if self.depths[0] != 0 or np.any(self.depths[1:] != self.depths[self.parents[1:]] + 1):
            raise ValueError("a node lies one deeper than its parent, the root at depth 0")

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    def ancestor_mask(self, size: int | None = None) -> np.ndarray:
        """Boolean [size, size]: row v sees column u when u is v or an ancestor of v.

        `size` ≥ num_nodes pads with nodes that see only themselves (docs/method.md, Draft trees).
        """
        size = self.num_nodes if size is None else size
        mask = np.eye(size, dtype=bool)
        for node in range(1, self.num_nodes):
            mask[node] |= mask[self.parents[node]]
        return mask

    def first(self, count: int) -> DraftTree:
        """The tree of the first `count` nodes."""
        return DraftTree(self.tokens[:count], self.parents[:count], self.depths[:count])

    def path(self, node: int) -> list[int]:
        """Node ids from the root to `node`, both included."""
        nodes = []
        while node >= 0:
            nodes.append(int(node))
            node = self.parents[node]
        return nodes[::-1]

    def children(self, node: int) -> list[int]:
        return [int(c) for c in np.nonzero(self.parents == node)[0]]


def tree_from_parents(tokens, parents) -> DraftTree:
    """A tree from tokens and parents alone; depths are derived. ValueError for what is no tree."""
    tokens, parents = _int32(tokens), _int32(parents)
    _check_parents(parents)
    depths = np.zeros_like(parents)
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
    return DraftTree(tokens, parents, depths)


def _check_parents(parents: np.ndarray) -> None:
    """Raise ValueError unless one root comes first and every parent before its children."""
    if len(parents) == 0 or parents[0] != -1 or np.any(parents >= np.arange(len(parents))):
        raise ValueError("a tree needs a root with parent -1 and parents before their children")
    if np.any(parents[1:] < 0):
        raise ValueError("a tree has one root")


def _int32(values) -> np.ndarray:
    """`values` as int32; ValueError for one that 32 bits do not hold, which numpy would cut."""
    given = np.asarray(values)
    narrow = given.astype(np.int32, copy=False)
    if narrow is not given and not np.array_equal(narrow, given):
        raise ValueError("token ids and parents are whole numbers of 32 bits")
    return narrow


def root_only(token: int) -> DraftTree:
    """The tree of plain decoding: one node."""
    return tree_from_parents([token], [-1])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities over the last axis in float32."""
    shifted = logits.astype(np.float32, copy=False) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@dataclass(frozen=True)
class BigramBias:
    """Low-rank bigram term on the parent token: `logits_child += u[parent] @ v.T`.

    u, v: float32 [V, bigram_rank] (docs/method.md, SS+). The latest parents' rows are kept, up to
    REMEMBERED_BYTES: few tokens are the parents of most nodes.
    """

    u: np.ndarray
    v: np.ndarray
    _rows: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    REMEMBERED_BYTES: ClassVar[int] = 8 << 20

    def __call__(self, token: int) -> np.ndarray:
        """What is added to the logits of the children of `token`, float32 [V]; not to be written to."""
        row = self._rows.get(token)
        if row is None:
            if len(self._rows) * self.v.shape[0] * 4 >= self.REMEMBERED_BYTES:
                del self._rows[next(iter(self._rows))]  # the oldest
            with np.errstate(invalid="ignore", over="ignore"):  # StreamChildren looks at the sum
                row = self._rows[token] = self.v @ self.u[token]
        return row


def best_first_tree(
    root: int,
    stream_logits: np.ndarray,
    num_nodes: int,
    bigram_bias: BigramBias | None = None,
    stop_ids: frozenset[int] = frozenset(),
    max_depth: int | None = None,
    max_children: int = 64,
) -> DraftTree:
    """The `num_nodes` most probable nodes, path probability = product of edge probabilities.

    stream_logits: [γ, V] of the position that decided `root`; row g-1 gives the children at depth g,
    re-weighted by the true parent token when there is a bigram bias. Best-first search pops nodes in
    order of path probability, so the result is the optimal tree of that size and closed under
    ancestors (docs/method.md, Draft trees). Ties go to the lower token id. Tokens in `stop_ids` get no
    children; no node lies deeper than `max_depth`. `max_children` bounds one node's children (the
    bias is applied over the whole vocabulary before that cut).
    """
    depth_limit = len(stream_logits) if max_depth is None else min(max_depth, len(stream_logits))
    children = StreamChildren(stream_logits, bigram_bias, min(max_children, num_nodes))
    return grow_best_first(root, num_nodes, children, stop_ids, depth_limit)


def grow_best_first(
    root: int,
    num_nodes: int,
    ranked: Callable[[tuple[int, ...]], tuple[np.ndarray, np.ndarray]],
    stop_ids: frozenset[int],
    depth_limit: int,
) -> DraftTree:
    """Best-first search over any distribution of children (`grow_with_probabilities`)."""
    return grow_with_probabilities(root, num_nodes, ranked, stop_ids, depth_limit)[0]


def grow_with_probabilities(
    root: int,
    num_nodes: int,
    ranked: Callable[[tuple[int, ...]], tuple[np.ndarray, np.ndarray]],
    stop_ids: frozenset[int],
    depth_limit: int,
    least: np.ndarray | None = None,
) -> tuple[DraftTree, np.ndarray]:
    """The tree of best-first search and its nodes' path probabilities, float64 [nodes], never growing.

    ranked: path of tokens (root first) → child ids and their log-probabilities, best first. Nodes are
    popped in order of path probability, equal ones in the order in which they were found. So the first
    nodes of a tree are the tree of that many nodes. least: [num_nodes], growing stops where a tree of
    that many nodes (counted from 1) could only be joined by a node of less probability.
    """
    paths, parents, probabilities = [(root,)], [-1], [1.0]
    limits = None if least is None else (-np.log(np.maximum(least, 1e-30))).tolist()
    frontier = _Frontier()

    def children(path: tuple[int, ...]) -> tuple[Sequence[int], Sequence[float]]:
        closed = len(path) > depth_limit or path[-1] in stop_ids or len(paths) == num_nodes
        return ((), ()) if closed else ranked(path)

    frontier.add_node(0.0, children(paths[0]))
    while frontier and len(paths) < num_nodes:
        cost, parent, token = frontier.pop()
        if limits is not None and cost > limits[len(paths) - 1]:
            break
        probabilities.append(float(np.exp(-cost)))
        paths.append((*paths[parent], token))
        parents.append(parent)
        frontier.add_node(cost, children(paths[-1]))
    tree = tree_from_parents([path[-1] for path in paths], parents)
    return tree, np.minimum.accumulate(np.array(probabilities))


class _Frontier:
    """Children that may join a tree next, by path probability, equal ones in the order of their creation.

    Of one node's children only the best that is not in the tree: the others are no better.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, int]] = []  # -log p, creation order, parent, child rank
        self._children: list[tuple[Sequence[int], Sequence[float]]] = []
        self._created = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add_node(self, cost: float, children: tuple[Sequence[int], Sequence[float]]) -> None:
        """The tree's next node: -log p of its path, its children's ids and log-probabilities."""
        self._children.append(children)
        self._push(len(self._children) - 1, 0, cost)

    def pop(self) -> tuple[float, int, int]:
        """-log p of the best child's path, its parent, its token. The next sibling takes its place."""
        cost, _, parent, rank = heapq.heappop(self._heap)
        ids, log_probs = self._children[parent]
        self._push(parent, rank + 1, cost + float(log_probs[rank]))
        return cost, parent, int(ids[rank])

    def _push(self, parent: int, rank: int, base: float) -> None:
        _, log_probs = self._children[parent]
        if rank < len(log_probs):
            heapq.heappush(self._heap, (base - float(log_probs[rank]), self._created, parent, rank))
            self._created += 1


class StreamChildren:
    """Children by the streams: path of tokens (root first) → the best ids and log-probabilities.

    stream_logits: [γ, V]; row g-1 at depth g, plus the parent's bias. `count` ids per node, none of a
    probability below `least`. Logits that overflow, or that damaged weights made, draft nothing: what is
    decoded is the same without them.
    """

    def __init__(
        self, stream_logits: np.ndarray, bigram_bias: BigramBias | None, count: int, least: float = 0.0
    ) -> None:
        self._logits, self._bias, self._count = stream_logits, bigram_bias, count
        self._floor = np.log(least) if least > 0 else -np.inf
        self._scored: dict[tuple[int, int], tuple[np.ndarray, np.float32]] = {}
        self._ranked: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, path: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        key = self._key(path)
        if key not in self._ranked:
            shifted, log_sum = self._scores(path)
            ids, scores = _best(shifted, self._count, self._floor + log_sum)
            possible = scores > -np.inf
            self._ranked[key] = ids[possible], scores[possible] - log_sum
        return self._ranked[key]

    def log_probs(self, path: tuple[int, ...], tokens: Sequence[int]) -> np.ndarray:
        """Log-probabilities of the children `tokens`, float32 [tokens]."""
        shifted, log_sum = self._scores(path)
        return shifted[tokens] - log_sum

    def _scores(self, path: tuple[int, ...]) -> tuple[np.ndarray, np.float32]:
        """Logits [V] below their largest, and the logarithm of their exponentials' sum: two parts of
        `log_softmax`, one pass over the vocabulary less."""
        key = self._key(path)
        if key not in self._scored:
            logits = self._logits[key[0]].astype(np.float32, copy=False)
            if self._bias is not None:
                logits = logits + self._bias(path[-1])
            with np.errstate(invalid="ignore"):
                shifted = logits - logits.max()
                log_sum = np.log(np.exp(shifted).sum())
            if not np.isfinite(log_sum):
                shifted, log_sum = np.full_like(logits, -np.inf), np.float32(0)
            self._scored[key] = shifted, log_sum
        return self._scored[key]

    def _key(self, path: tuple[int, ...]) -> tuple[int, int]:
        return len(path) - 1, path[-1] if self._bias else -1


def _best(scores: np.ndarray, count: int, floor: float = -np.inf) -> tuple[np.ndarray, np.ndarray]:
    """Ids and values of the `count` largest scores that reach `floor`, best first, ties to the lower id."""
    if floor > -np.inf:
        ids = np.nonzero(scores >= floor)[0]
    elif count < len(scores):
        threshold = np.partition(scores, len(scores) - count)[len(scores) - count]
        ids = np.nonzero(scores >= threshold)[0]
    else:
        ids = np.arange(len(scores))
    order = ids[np.argsort(-scores[ids], kind="stable")][:count]
    return order, scores[order]


def k_ary_tree(
    root: int,
    stream_logits: np.ndarray,
    k: int,
    max_nodes: int | None = None,
    stop_ids: frozenset[int] = frozenset(),
    max_depth: int | None = None,
) -> DraftTree:
    """The papers' draft: the Cartesian product of each stream's top k, 1 + Σ k^g nodes, level by level.

    Cut after `max_nodes` nodes when given. stream_logits: [γ, V].
    """
    depth_limit = len(stream_logits) if max_depth is None else min(max_depth, len(stream_logits))
    limit = max_nodes or sum(k**g for g in range(len(stream_logits) + 1))
    tokens, parents, level = [root], [-1], [0]
    for depth in range(depth_limit):
        ids, _ = _best(stream_logits[depth].astype(np.float32), k)
        grown = []
        for parent in level:
            if tokens[parent] in stop_ids:
                continue
            for token in ids:
                if len(tokens) == limit:
                    return tree_from_parents(tokens, parents)
                grown.append(len(tokens))
                tokens.append(int(token))
                parents.append(parent)
        level = grown
    return tree_from_parents(tokens, parents)


def keep_best_nodes(node_scores: np.ndarray, keep: int) -> np.ndarray:
    """Ids (ascending) of the `keep` highest-scoring nodes; ties go to the lower index.

    node_scores: float [num_nodes], path log-probabilities, so a parent never scores below its child
    and the kept set holds the root and is closed under ancestors (docs/method.md, Pruning).
    """
    order = np.argsort(-node_scores, kind="stable")[:keep]
    return np.sort(order)
