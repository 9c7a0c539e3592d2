"""The tuner's parts: predictions from recorded ranks against trees that are walked, pruned candidates."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from ss_device.decoding import Drafter, decode
from ss_device.draft_choice import DraftChoice
from ss_device.errors import UserError
from ss_device.training.validation import rank_statistics
from ss_device.tree import best_first_tree, k_ary_tree
from ss_runtime.bench.pruning import decoded_tokens_per_call, measure_pruned
from ss_runtime.bench.recorded_ranks import path_shares, predicted_tokens_per_call
from ss_runtime.bench.tuner import pruned_candidates
from tests.runtime.mlx_cases import CONFIGS, PROMPT, mlx_model
from tests.tiny_models import random_adapter

GAMMA, VOCAB, POSITIONS = 3, 12, 400


@pytest.fixture(scope="module")
def drafts():
    """Stream logits [positions, γ, V] and the tokens that came [positions, γ], likely ones more often."""
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=2.0, size=(POSITIONS, GAMMA, VOCAB)).astype(np.float32)
    noise = rng.gumbel(size=logits.shape)
    return logits, (logits + noise).argmax(-1)


@pytest.fixture(scope="module")
def shares(drafts):
    logits, tokens = drafts
    own = np.take_along_axis(logits, tokens[..., None], -1)
    ranks = (logits > own).sum(-1)
    return path_shares(rank_statistics([np.concatenate([np.zeros((POSITIONS, 1), int), ranks], 1)]))


def walked(tree, tokens):
    """Accepted nodes when these tokens come."""
    node, accepted = 0, 0
    for token in tokens:
        following = [c for c in tree.children(node) if tree.tokens[c] == token]
        if not following:
            break
        node, accepted = following[0], accepted + 1
    return accepted


@pytest.mark.parametrize("nodes", [1, 2, 4, 9, 13, 40])
def test_predictions_are_what_walking_the_trees_gives(drafts, shares, nodes):
    logits, tokens = drafts
    trees = {
        "k-ary": lambda row: k_ary_tree(VOCAB, row, 3, nodes),
        "chain": lambda row: best_first_tree(VOCAB, row, nodes, max_children=1),
    }
    for shape, make in trees.items():
        accepted = [walked(make(row), came) for row, came in zip(logits, tokens, strict=True)]
        choice = DraftChoice(nodes, shape)
        assert predicted_tokens_per_call(shares, choice) == pytest.approx(1 + np.mean(accepted))


def test_the_best_fixed_tree_is_the_best_of_all(shares):
    """Against every set of rank paths that holds its paths' beginnings."""
    likely = sorted(shares, key=lambda path: -shares[path])[:12]
    for nodes in (2, 3, 4, 5):
        closed = (
            paths
            for paths in combinations(likely, nodes - 1)
            if all(len(path) == 1 or path[:-1] in paths for path in paths)
        )
        best = max(sum(shares[path] for path in paths) for paths in closed)
        assert predicted_tokens_per_call(shares, DraftChoice(nodes)) == pytest.approx(1 + best)
    fewer = predicted_tokens_per_call(shares, DraftChoice(40, max_streams=1))
    assert fewer <= 2 < predicted_tokens_per_call(shares, DraftChoice(40))


@pytest.mark.parametrize(
    "statistics",
    [{}, {"counts": [[1, 2]], "joint": {}}, {"counts": [[1]], "joint": {"x": 1}}, {"counts": 3}],
)
def test_damaged_statistics_ask_for_prompts(statistics):
    with pytest.raises(UserError, match="--input"):
        path_shares(statistics)


@pytest.mark.parametrize("compiled", [False, True])
def test_kept_nodes_can_be_changed(mlx_base, compiled):
    """The same steps as a model built for them, and a measurement leaves the model as it was."""
    adapter = random_adapter(mlx_base, CONFIGS["paper"])
    settings = {"stream_rows": "accepted", "compiled": compiled}
    model = mlx_model(mlx_base, adapter, **settings)
    built = {kept: mlx_model(mlx_base, adapter, num_kept=kept, **settings) for kept in (8, 3)}

    def steps(one):
        return [(s.tokens, s.num_drafted) for s in decode(one, Drafter(8), PROMPT, 20)]

    for kept in (8, 3, 8):
        model.keep(kept)
        assert steps(model) == steps(built[kept])
    measured = measure_pruned(model, 12, 2)
    assert [(found["nodes"], found["kept"]) for found in measured] == [(8, 4), (8, 2)]
    assert all(found["step_seconds"] > 0 for found in measured)
    per_call = decoded_tokens_per_call(model, 3, Drafter(8), [PROMPT], 20, frozenset())
    assert per_call == 19 / (len(steps(built[3])) - 1)
    assert model.limits.num_kept == 8 and steps(model) == steps(built[8])
    with pytest.raises(UserError, match="kept nodes 9"):
        model.keep(9)


def test_pruned_trees_are_decoded_only_where_they_could_win():
    """8 nodes: 4 kept save 6 ms of 10 and could win, 2 kept cost more than all of them."""
    pruned = [
        {"nodes": 8, "kept": kept, "step_seconds": seconds, "unpruned_step_seconds": 0.010}
        for kept, seconds in ((4, 0.004), (2, 0.011))
    ]
    known = {"tokens_per_call": 2.0, "step_seconds": 0.012, "draft_seconds": 0.0}
    known["tokens_per_second"] = 2.0 / 0.012
    judged = {DraftChoice(8, "best-first", lookup): known for lookup in (False, True)}
    asked = []
    choices, found = pruned_candidates(
        judged, {"pruned": pruned}, [known], lambda choice: asked.append(choice) or 1.5
    )
    assert [c.num_kept for c in asked] == [4, 4] and [c.num_kept for c in choices] == [4, 4, 2, 2]
    assert [f["bound"] for f in found] == [False, False, True, True]
    assert [f["tokens_per_call"] for f in found] == [1.5, 1.5, 2.0, 2.0]
    assert found[0]["tokens_per_second"] == pytest.approx(1.5 / 0.006, rel=1e-3)
    assert found[2]["tokens_per_second"] == pytest.approx(2.0 / 0.013, rel=1e-3)
