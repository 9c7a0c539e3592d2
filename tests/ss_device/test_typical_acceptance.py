"""Typical acceptance: Medusa's threshold, and the longest path by brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from ss_device.acceptance import walk
from ss_device.decoding import Drafter, decode
from ss_device.errors import UserError
from ss_device.sampling import Sampler, Sampling, TypicalAcceptance
from ss_device.tree import tree_from_parents
from ss_device.tree_choice import choose_on_tree
from tests.ss_device.test_sampled_decoding import Markov

VOCAB = 12


def random_tree(rng, nodes: int):
    """Parents before children; children of a node have different tokens."""
    tokens, parents, used = [0], [-1], {}
    for node in range(1, nodes):
        parent = int(rng.integers(max(0, node - 4), node))
        free = [t for t in range(VOCAB) if t not in used.setdefault(parent, set())]
        token = int(rng.choice(free))
        used[parent].add(token)
        tokens.append(token)
        parents.append(parent)
    return tree_from_parents(np.array(tokens, np.int32), np.array(parents, np.int32))


def accepted(sampler, tree, kept, logits, text=(5,)) -> list[int]:
    """The walk of what is chosen."""
    return walk(tree, kept, choose_on_tree(sampler, tree, [*text, int(tree.tokens[0])], kept, logits))


def test_the_published_values_and_the_threshold():
    rule, probabilities = TypicalAcceptance(), Sampling().probabilities
    peaked, flat = probabilities(np.log([0.7, 0.2, 0.05, 0.05])), probabilities(np.zeros(4))
    assert rule.epsilon == 0.09 and rule.threshold(np.array([1.0, 0.0])) == 0.09
    entropy = -sum(p * math.log(p) for p in (0.7, 0.2, 0.05, 0.05))
    assert rule.threshold(peaked) == min(0.09, 0.3 * math.exp(-entropy)) == 0.09
    assert rule.threshold(flat) == pytest.approx(0.3 / 4)
    assert TypicalAcceptance(0.25).threshold(flat) == pytest.approx(0.5 / 4)
    assert TypicalAcceptance(0.25, delta=0.1).threshold(flat) == pytest.approx(0.1 / 4)
    # A larger epsilon asks for more, up to its end: no value is without effect.
    thresholds = [TypicalAcceptance(e).threshold(peaked) for e in (0.01, 0.09, 0.3, 0.6, 1.0)]
    assert thresholds == sorted(set(thresholds))
    with pytest.raises(UserError, match="epsilon"):
        TypicalAcceptance(epsilon=0.0)
    with pytest.raises(UserError, match="delta"):
        TypicalAcceptance(delta=1.5)
    with pytest.raises(UserError, match="temperature"):
        Sampler(lossy_typical=rule)


def test_the_longest_path_not_the_likeliest_child():
    """A root with children p = .51, a leaf, and p = .49 above two certain tokens."""
    tree = tree_from_parents(np.array([0, 1, 2, 3, 4], np.int32), np.array([-1, 0, 0, 2, 3], np.int32))
    logits = np.full((5, VOCAB), -np.inf)
    for node, probabilities in enumerate(({1: 0.51, 2: 0.49}, {7: 1.0}, {3: 1.0}, {4: 1.0}, {9: 1.0})):
        for token, p in probabilities.items():
            logits[node, token] = math.log(p)
    sampler = Sampler(Sampling(seed=1), lossy_typical=TypicalAcceptance())
    assert accepted(sampler, tree, np.arange(5), logits) == [0, 2, 3, 4]
    # Pruned below node 2: both paths have one token, and the likelier one is taken.
    assert accepted(sampler, tree, np.arange(3), logits[:3]) == [0, 1]


@pytest.mark.parametrize("seed", range(40))
def test_the_longest_typical_path_by_brute_force(seed):
    """All paths are tried; of the longest the likeliest wins, first and after every drawn child."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, int(rng.integers(2, 16)))
    kept = [0]  # closed under ancestors
    kept += [n for n in range(1, tree.num_nodes) if tree.parents[n] in kept and rng.random() < 0.9]
    kept = np.array(sorted(kept))
    logits = rng.normal(0, 2.5, (len(kept), VOCAB))
    sampling, rule = Sampling(temperature=0.9, top_k=8, seed=seed), TypicalAcceptance(0.05)
    sampler = Sampler(sampling, lossy_typical=rule)
    rows = {int(node): sampling.probabilities(logits[row]) for row, node in enumerate(kept)}

    def typical(parent: int, child: int) -> bool:
        return rows[parent][tree.tokens[child]] > rule.threshold(rows[parent])

    def likelihood(path) -> float:
        return sum(math.log(rows[a][tree.tokens[b]]) for a, b in itertools.pairwise(path))

    paths = {int(n): [int(n)] for n in kept}
    for node in kept[1:]:
        paths[int(node)] = [*paths[int(tree.parents[node])], int(node)]
    expected = [0]
    while True:
        start = expected[-1]
        below = [p[p.index(start) :] for p in paths.values() if start in p]
        fitting = [p for p in below if all(typical(a, b) for a, b in itertools.pairwise(p))]
        expected += max(fitting, key=lambda p: (len(p), likelihood(p)))[1:]
        last = expected[-1]
        depth = int(tree.depths[last])
        drawn = sampling.choose(logits[np.searchsorted(kept, last)], 2 + depth)
        children = [int(c) for c in tree.children(last) if c in kept and tree.tokens[c] == drawn]
        if not children:
            break
        expected += children
    assert accepted(sampler, tree, kept, logits) == expected


def test_processors_are_asked_with_the_text_of_each_path():
    """A token that a processor forbids on one path only."""
    tree = tree_from_parents(np.array([0, 1, 2, 3, 3], np.int32), np.array([-1, 0, 0, 1, 2], np.int32))
    logits = np.zeros((5, VOCAB))
    logits[:, [1, 2, 3]] = 6.0

    def after_one(text, values):
        return np.where(np.arange(VOCAB) == 3, -np.inf, values) if text[-1] == 1 else values

    sampler = Sampler(Sampling(seed=2), (after_one,), TypicalAcceptance())
    assert accepted(sampler, tree, np.arange(5), logits)[:3] == [0, 2, 4]


def test_fewer_calls_than_exact_sampling():
    calls = {True: 0, False: 0}
    for seed in range(20):
        for lossy in calls:
            sampler = Sampler(Sampling(seed=seed), lossy_typical=TypicalAcceptance() if lossy else None)
            calls[lossy] += len(list(decode(Markov(), Drafter(8), [0], 30, sampler=sampler)))
    assert calls[True] < calls[False]
