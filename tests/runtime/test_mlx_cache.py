"""Key/value buffers: commits, growth, forgetting (docs/method.md, Invariants, 4)."""

import numpy as np
import pytest

from ss_device.tree import root_only
from tests.runtime.mlx_cases import CONFIGS, PROMPT, SHARED, mlx_model, random_tree
from tests.tiny_models import VOCAB, random_adapter


def contents(model):
    """[layers, 2, kv_heads, length, head_dim] of the committed text."""
    length = model.cache.length
    return np.array([[np.array(b)[0, :, :length] for b in pair] for pair in model.cache.layers])


@pytest.mark.parametrize("num_kept", [8, 6])
def test_cache_after_commits_is_that_of_the_text(mlx_base, num_kept):
    """Any path may be committed; buffers of 16 slots grow on the way."""
    adapter = random_adapter(mlx_base, CONFIGS["paper"])
    model = mlx_model(mlx_base, adapter, num_kept=num_kept, bucket=16)
    rng = np.random.default_rng(5)
    text = list(PROMPT)
    model.prefill(text)
    for _ in range(6):
        tree = random_tree(rng, 8, int(rng.integers(3, VOCAB)), VOCAB)
        kept = model.step(tree).kept
        path = tree.path(int(kept[-1]))
        model.commit(path)
        text += tree.tokens[path].tolist()
    assert model.cache.length == len(text) and model.cache.capacity % 16 == 0
    fresh = mlx_model(mlx_base, adapter)
    fresh.prefill(text)
    np.testing.assert_allclose(contents(model), contents(fresh), atol=1e-4)


def test_shared_cache_of_generated_positions(mlx_base):
    """With main attending to streams, positions committed from a tree equal those taken one by one."""
    adapter = random_adapter(mlx_base, SHARED[True])
    tree_model, plain = mlx_model(mlx_base, adapter), mlx_model(mlx_base, adapter)
    tree = random_tree(np.random.default_rng(6), 8, 50, VOCAB)
    path = tree.path(7)
    tree_model.prefill(PROMPT)
    tree_model.step(tree)
    tree_model.commit(path)
    plain.prefill(PROMPT)
    for token in tree.tokens[path]:
        plain.step(root_only(int(token)))
        plain.commit([0])
    np.testing.assert_allclose(contents(tree_model), contents(plain), atol=1e-4)


def test_a_step_changes_nothing_and_prefill_forgets(mlx_base):
    model = mlx_model(mlx_base, random_adapter(mlx_base, CONFIGS["rich"]))
    rng = np.random.default_rng(8)
    first = model.prefill(PROMPT)
    before = contents(model)
    tree = random_tree(rng, 8, 50, VOCAB)
    once = model.step(tree)
    model.step(random_tree(rng, 5, 51, VOCAB))
    again = model.step(tree)
    assert np.array_equal(before, contents(model))
    assert np.array_equal(once.chosen, again.chosen)
    assert np.array_equal(once.stream_logits, again.stream_logits)
    model.prefill(rng.integers(3, VOCAB, 60).tolist())
    second = model.prefill(PROMPT)
    np.testing.assert_allclose(first.stream_logits, second.stream_logits, atol=1e-5)
    np.testing.assert_allclose(before, contents(model), atol=1e-5)
