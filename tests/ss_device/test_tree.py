"""Trees against brute force, the walk by hand, traces and formats there and back."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ss_device.acceptance import walk
from ss_device.architecture import Architecture
from ss_device.config import SpeculativeConfig, paper_config, parameter_count
from ss_device.errors import UserError
from ss_device.prompt_lookup import NgramHistory, NgramTrust, PromptLookup, mixed_children
from ss_device.trace import Trace, TraceStep, load_traces, probes, save_traces
from ss_device.tree import BigramBias, best_first_tree, k_ary_tree, root_only, tree_from_parents


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def path_tokens(tree, node):
    return tuple(int(tree.tokens[n]) for n in tree.path(node)[1:])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("nodes", [2, 7, 20])
def test_best_first_tree_is_the_most_probable_set(biased, nodes):
    """Brute force over every path of a vocabulary of 5 and depth 3."""
    rng = np.random.default_rng(nodes)
    logits = rng.normal(0, 2, (3, 5)).astype(np.float32)
    bias = BigramBias(rng.normal(0, 1, (5, 3)), rng.normal(0, 1, (5, 3))) if biased else None
    probability = {}
    for depth in (1, 2, 3):
        for path in itertools.product(range(5), repeat=depth):
            value, parent = 1.0, 4
            for level, token in enumerate(path):
                row = logits[level] + (bias(parent) if bias else 0)
                value *= softmax(row.astype(np.float64))[token]
                parent = token
            probability[path] = value
    best = sorted(probability, key=lambda p: -probability[p])[: nodes - 1]
    tree = best_first_tree(4, logits, nodes, bias)
    assert {path_tokens(tree, v) for v in range(1, tree.num_nodes)} == set(best)
    assert [path_tokens(tree, v) for v in range(1, tree.num_nodes)] == best


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_draft_nothing(value):
    """Damaged weights, or an overflow in half precision; n-grams are drafted all the same."""
    logits = np.zeros((2, 5), np.float32)
    logits[1] = value
    assert best_first_tree(4, logits, 9).depths.max() == 1
    u, v = np.ones((5, 1), np.float32), np.full((5, 1), value, np.float32)
    assert best_first_tree(4, logits[:1], 9, BigramBias(u, v)).num_nodes == 1
    ngrams = NgramHistory(PromptLookup(), [1, 2, 3, 4, 1, 2, 3], NgramTrust())
    ids, log_probs = mixed_children(logits[1:], ngrams, None, 4)((3,))
    assert list(ids) == [4] and np.isfinite(log_probs).all()


def test_tokens_that_cannot_come_are_no_children():
    logits = np.array([[0, -np.inf, -np.inf, 1]], np.float32)
    assert best_first_tree(0, logits, 4).tokens.tolist() == [0, 3, 0]


def test_best_first_tree_respects_stop_ids_depth_and_ties():
    flat = np.zeros((3, 6), np.float32)
    tree = best_first_tree(0, flat, 4)
    assert tree.tokens.tolist() == [0, 0, 1, 2]
    assert best_first_tree(2, flat, 9, stop_ids=frozenset({2})).num_nodes == 1
    peaked = np.full((3, 6), -9.0, np.float32)
    peaked[:, 3] = 9.0
    chain = best_first_tree(0, peaked, 4)
    assert chain.parents.tolist() == [-1, 0, 1, 2] and chain.tokens.tolist() == [0, 3, 3, 3]
    assert best_first_tree(0, peaked, 9, max_depth=2).depths.max() == 2
    stopped = best_first_tree(0, peaked, 9, stop_ids=frozenset({3}))
    assert not stopped.children(1)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_k_ary_tree_has_the_papers_size(k):
    logits = np.random.default_rng(k).normal(size=(4, 9)).astype(np.float32)
    tree = k_ary_tree(0, logits, k)
    assert tree.num_nodes == 1 + sum(k**g for g in range(1, 5))
    for node in range(tree.num_nodes):
        top = np.argsort(-logits[tree.depths[node]])[:k] if tree.depths[node] < 4 else []
        assert [int(tree.tokens[c]) for c in tree.children(node)] == list(top)


def test_ancestor_mask_by_hand():
    tree = tree_from_parents([1, 2, 3, 4, 5], [-1, 0, 0, 1, 2])
    assert tree.depths.tolist() == [0, 1, 1, 2, 2]
    expected = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0],
                [1, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 1]]  # fmt: skip
    assert tree.ancestor_mask(6).astype(int).tolist() == expected
    with pytest.raises(ValueError, match="parents before"):
        tree_from_parents([1, 2], [-1, 1])


def test_walk_follows_kept_children_only():
    tree = tree_from_parents([9, 5, 6, 7, 8], [-1, 0, 0, 2, 3])
    everything = np.arange(5)
    assert walk(tree, everything, np.array([6, 0, 7, 8, 1])) == [0, 2, 3, 4]
    assert walk(tree, everything, np.array([6, 0, 1, 8, 1])) == [0, 2]
    assert walk(tree, np.array([0, 2]), np.array([6, 7])) == [0, 2]
    assert walk(tree, everything, np.array([4, 0, 0, 0, 0])) == [0]


@pytest.mark.parametrize(("hidden", "paper"), [(2048, 4.096e4), (3072, 6.1e4), (4096, 8.19e4)])
def test_extra_parameters_are_20_h(hidden, paper):
    """The papers' overhead column, beyond plain LoRA."""
    architecture = Architecture(
        "llama", 32000, hidden, 4 * hidden, 32, 32, 8, hidden // 32, 1e-5, 1e4, 4096, False
    )
    counts = parameter_count(paper_config("shared"), architecture)
    extra = sum(v for n, v in counts.items() if n != "lora")
    assert extra == 20 * hidden
    assert extra == pytest.approx(paper, rel=0.01)
    assert sum(parameter_count(paper_config(), architecture).values()) == 84 * hidden


def test_config_refuses_what_cannot_be():
    for raw, word in (
        ({"mode": "fast"}, "mode"), ({"num_streams": 0}, "num_streams"),
        ({"main_attends_streams": True}, "shared"), ({"lora_rank": 4}, "shared"),
        ({"stream_position": "x"}, "stream_position"), ({"gamma": 4}, "gamma"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=word):
            SpeculativeConfig.from_dict(raw)
    config = SpeculativeConfig(bigram_rank=3, stream_mlp="base")
    assert SpeculativeConfig.from_dict(config.to_dict()) == config


def test_traces_there_and_back(tmp_path):
    rng = np.random.default_rng(0)
    steps = []
    for tree, path in (
        (root_only(4), (0,)), (tree_from_parents([3, 1, 2, 3, 4], [-1, 0, 0, 1, 1]), (0, 1, 4))
    ):  # fmt: skip
        kept = np.arange(tree.num_nodes, dtype=np.int32)
        chosen = np.array([3, 5, 5, 5, 5] if tree.num_nodes == 1 else [1, 4, 9, 9, 8])[kept]
        ids, values = probes(rng.normal(size=(3, 20)).astype(np.float32), 4)
        margins = rng.random(tree.num_nodes, np.float32)
        steps.append(TraceStep(tree, kept, chosen.astype(np.int32), margins, path, ids, values))
    trace = Trace("a question", (1, 2, 3), (4, 3, 1, 4), 0.5, tuple(steps))
    save_traces([trace, trace], tmp_path / "golden")
    for loaded in load_traces(tmp_path / "golden", 20):
        assert (loaded.text, loaded.prompt, loaded.generated) == ("a question", (1, 2, 3), (4, 3, 1, 4))
        for mine, theirs in zip(steps, loaded.steps, strict=True):
            assert mine.path == theirs.path
            for name in ("kept", "chosen", "margins", "probe_ids", "probe_logits"):
                np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
            np.testing.assert_array_equal(mine.tree.parents, theirs.tree.parents)
    (tmp_path / "golden.json").write_text('{"format_version": 2}')
    with pytest.raises(UserError, match="version 2"):
        load_traces(tmp_path / "golden")
