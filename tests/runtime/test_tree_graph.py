"""Tree operations in the graph against their plain counterparts."""

import mlx.core as mx
import numpy as np
import pytest

from ss_device.acceptance import walk
from ss_device.tree import keep_best_nodes as best_on_the_host
from ss_device.tree import tree_from_parents
from ss_runtime.mlx.tree_graph import (
    TreeArrays,
    accepted_row,
    cache_mask,
    keep_best_nodes,
    node_scores,
    stream_mask,
)
from tests.runtime.mlx_cases import random_tree


def on_device(tree, size):
    padding = size - tree.num_nodes
    parts = [
        np.concatenate([part, np.full(padding, fill, np.int32)])
        for part, fill in ((tree.tokens, tree.tokens[0]), (tree.parents, -1), (tree.depths, 0))
    ]
    ancestors = mx.array(tree.ancestor_mask(size))
    return TreeArrays(*map(mx.array, parts), ancestors, mx.array([tree.num_nodes]))


@pytest.mark.parametrize("seed", range(5))
def test_pruning_keeps_the_best_closed_set(seed):
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 9, 3, 50)
    edges = np.log(rng.uniform(0.2, 1, 12)).astype(np.float32)
    edges[rng.integers(1, 9, 3)] = 0  # certain children tie with their parents
    scores = np.zeros(9, np.float32)
    for node in range(1, 9):
        scores[node] = scores[tree.parents[node]] + edges[node]
    got = node_scores(on_device(tree, 12), mx.array(edges))
    np.testing.assert_allclose(np.array(got)[:9], scores, atol=1e-6)
    assert np.all(np.isneginf(np.array(got)[9:]))
    for keep in (1, 4, 9, 11):
        kept = np.array(keep_best_nodes(got, keep))
        assert np.array_equal(kept[kept < 9], best_on_the_host(np.array(got)[:9], keep))
        assert kept[0] == 0 and all(tree.parents[n] in kept for n in kept[1:] if n < 9)


def test_a_kept_subtree_has_its_own_numbers():
    tree = tree_from_parents([1, 2, 3, 4, 5, 6], [-1, 0, 0, 2, 2, 4])
    kept = on_device(tree, 8).keep(mx.array([0, 2, 4, 5, 6]))
    expected = tree_from_parents([1, 3, 5, 6], [-1, 0, 1, 2])
    assert kept.tokens.tolist()[:4] == expected.tokens.tolist()
    assert kept.parents.tolist() == [-1, 0, 1, 2, -1]
    assert np.array_equal(np.array(kept.ancestors), expected.ancestor_mask(5))
    assert kept.num_real.tolist() == [4]


@pytest.mark.parametrize("seed", range(20))
def test_accepted_node_is_where_the_walk_ends(seed):
    """Four token values only, so that siblings repeat and deep nodes are reached."""
    rng = np.random.default_rng(seed)
    parents = [-1] + [int(rng.integers(0, node)) for node in range(1, 10)]
    tree = tree_from_parents(rng.integers(0, 4, 10), parents)
    chosen = rng.integers(0, 4, 12).astype(np.int32)
    path = walk(tree, np.arange(10), chosen[:10])
    assert accepted_row(on_device(tree, 12), mx.array(chosen)).tolist() == [path[-1]]


@pytest.mark.parametrize("attends", [False, True])
def test_stream_mask_follows_the_four_rules(attends):
    tree, streams = tree_from_parents([1, 2, 3], [-1, 0, 0]), 2
    ancestors = tree.ancestor_mask()
    mask = np.array(stream_mask(mx.array(ancestors), streams, attends))
    owners = [(n, 0) for n in range(3)] + [(n, j) for n in range(3) for j in (1, 2)]
    for row, (i, j) in enumerate(owners):
        for column, (s, k) in enumerate(owners):
            if k == 0:
                sees = ancestors[i, s]
            elif j == 0:
                sees = attends and i == s
            else:
                sees = i == s and k <= j
            assert mask[row, column] == sees


def test_cache_mask_shows_the_text_and_the_rows_of_this_step():
    rows = mx.array([[True, False], [True, True]])
    mask = np.array(cache_mask(rows, mx.array([3]), mx.array([4]), 8)).astype(int)
    assert mask.tolist() == [[1, 1, 1, 0, 1, 0, 0, 0], [1, 1, 1, 0, 1, 1, 0, 0]]
