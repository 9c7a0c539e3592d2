"""Recorded draft trees of random settings, each with its ancestor mask and a walk.

Trees whose order hangs on less than float32 rounding are left out, so that the recording holds on every
machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ss_device import tree as trees
from ss_device.acceptance import walk
from ss_device.decoding import Drafter
from ss_device.step_model import Proposal
from ss_device.tree import DraftTree
from tests.swift.recorded_columns import KINDS, SHAPES, Columns, hash_bias, hash_logits


@dataclass(frozen=True)
class TreeCase:
    """One tree to grow; stop_modulus: ids divisible by it are stop ids (0: none)."""

    key: int
    vocab: int
    streams: int
    nodes: int
    shape: str
    tree_top_k: int
    rank: int
    kind: str
    root: int
    max_depth: int
    stop_modulus: int

    def grow(self) -> DraftTree:
        logits = hash_logits(self.key, self.streams, self.vocab, self.kind)
        stops = frozenset(range(0, self.vocab, self.stop_modulus)) if self.stop_modulus else frozenset()
        bias = hash_bias(self.key, self.vocab, self.rank)
        drafter = Drafter(self.nodes, self.shape, self.tree_top_k, bias)
        return drafter.grow(Proposal(self.root, logits), stops, self.max_depth)


def tree_cases(count: int, seed: int = 0):
    """Random cases; the order of a tie-free tree must not hang on rounding (see `is_robust`)."""
    rng = np.random.default_rng(seed)
    while count:
        vocab = int(rng.choice([7, 40, 300, 1000, 5000]))
        kind = KINDS[int(rng.random() < 0.25)]
        case = TreeCase(
            key=int(rng.integers(1, 2**62)),
            vocab=vocab,
            streams=int(rng.integers(1, 6)),
            nodes=int(rng.choice([1, 2, 5, 8, 12, 32, 64])),
            shape=SHAPES[int(rng.choice([0, 0, 0, 0, 1, 2]))],
            tree_top_k=int(rng.integers(1, 5)),
            rank=0 if kind == "ties" else int(rng.choice([0, 0, 3, 8])),
            kind=kind,
            root=int(rng.integers(vocab)),
            max_depth=int(rng.choice([0, 1, 2, 3, 99, 99, 99])),
            stop_modulus=int(rng.choice([0, 0, 0, 5])),
        )
        if is_robust(case):
            count -= 1
            yield case


def is_robust(case: TreeCase) -> bool:
    """Whether the tree is the same in float64: no choice in it hangs on float32 rounding.

    Ties of whole numbers are exact inside a row; between rows they are only exact when both sides round
    alike, so such a tree must also come out of float64 arithmetic.
    """
    return np.array_equal(case.grow().tokens, _in_double(case).tokens) and all(
        np.array_equal(case.grow().parents, _in_double(case, scale).parents)
        for scale in (1.0, 1 - 1e-6, 1 + 1e-6)
    )


def _in_double(case: TreeCase, scale: float = 1.0) -> DraftTree:
    """The case's tree with a log-softmax in float64, its normaliser off by `scale`."""
    original = trees.log_softmax

    def exact(logits: np.ndarray) -> np.ndarray:
        shifted = logits.astype(np.float64) - logits.max()
        return (shifted - scale * np.log(np.exp(shifted).sum())).astype(np.float64)

    trees.log_softmax = exact
    try:
        return case.grow()
    finally:
        trees.log_softmax = original


def export_trees(path: Path, count: int = 420) -> None:
    """Cases with their trees, padded ancestor masks and a walk each."""
    rng = np.random.default_rng(1)
    columns = Columns()
    for case in tree_cases(count):
        tree = case.grow()
        columns.add(np.int64, key=case.key)
        columns.add(
            vocab=case.vocab,
            streams=case.streams,
            nodes=case.nodes,
            shape=SHAPES.index(case.shape),
            tree_top_k=case.tree_top_k,
            rank=case.rank,
            kind=KINDS.index(case.kind),
            root=case.root,
            max_depth=case.max_depth,
            stop_modulus=case.stop_modulus,
            tokens=tree.tokens,
            parents=tree.parents,
            depths=tree.depths,
        )
        columns.add(np.uint8, mask=np.packbits(tree.ancestor_mask(tree.num_nodes + 3)))
        kept, chosen = random_choices(rng, tree, case.vocab)
        columns.add(kept=kept, chosen=chosen, path=walk(tree, kept, chosen))
    save_file(columns.arrays(), path)


def random_choices(rng: np.random.Generator, tree: DraftTree, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """A kept set closed under ancestors, and a token per kept node that often is one of its children's."""
    kept = [0]
    for node in range(1, tree.num_nodes):
        if tree.parents[node] in kept and rng.random() < 0.85:
            kept.append(node)
    chosen = []
    for node in kept:
        children = tree.children(node)
        drafted = children and rng.random() < 0.75
        chosen.append(int(tree.tokens[rng.choice(children)]) if drafted else int(rng.integers(vocab)))
    return np.array(kept, np.int32), np.array(chosen, np.int32)
