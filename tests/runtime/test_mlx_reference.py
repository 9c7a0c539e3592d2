"""MLX against the PyTorch reference: every output of every step, over forced random trees."""

from dataclasses import replace

import numpy as np
import pytest

from ss_device.config import SpeculativeConfig
from ss_device.decoding import Drafter, decode
from ss_device.reference.step_model import ReferenceStepModel
from ss_device.reference.stream_model import load_stream_model
from tests.families.tiny import make_base
from tests.runtime.mlx_cases import CONFIGS, PROMPT, SHARED, mlx_model, random_tree
from tests.tiny_models import VOCAB, random_adapter

VARIANTS = {
    **CONFIGS,
    "shift-base": SpeculativeConfig(
        num_streams=3,
        num_msa_layers=2,
        stream_mlp="base",
        stream_adapter_rank=0,
        stream_lora_rank=4,
        stream_lora_alpha=2.0,
        pruning_rank=4,
    ),
    "adapter-lora": SpeculativeConfig(
        num_streams=2, num_msa_layers=2, stream_lora_rank=4, stream_lora_alpha=8.0, stream_position="same"
    ),
    "values turned": SpeculativeConfig(num_streams=3, num_msa_layers=2, value_rotation=0.4),
    "top keys": SpeculativeConfig(num_streams=2, num_msa_layers=3, stream_top_keys=4),
    "shared": SHARED[False],
    "shared-attends": SHARED[True],
    "shared-attends, turned, top keys": replace(SHARED[True], value_rotation=0.5, stream_top_keys=3),
}


def models(base, config, **settings):
    adapter = random_adapter(base, config)
    reference = ReferenceStepModel(load_stream_model(base, adapter), context=128, **settings)
    return reference, mlx_model(base, adapter, bucket=32, **settings)


def follow(reference, model, rng, steps=5, accepts=1):
    """Drive both with the same trees, whose drafts are partly right, and compare all they say.

    accepts: drafts that some step has to accept.
    """
    expected, got = reference.prefill(PROMPT), model.prefill(PROMPT)
    longest = 0
    for _ in range(steps):
        assert got.root == expected.root
        np.testing.assert_allclose(got.stream_logits, expected.stream_logits, atol=1e-4)
        tree = lucky_tree(reference, expected.root, rng)
        theirs, ours = reference.step(tree), model.step(tree)
        assert np.array_equal(ours.kept, theirs.kept)
        assert np.array_equal(ours.chosen, theirs.chosen)
        assert ours.accepted_node == theirs.accepted_node
        path = tree.path(ours.accepted_node)
        longest = max(longest, len(path))
        reference.commit(path)
        model.commit(path)
        root = int(theirs.chosen[np.searchsorted(theirs.kept, theirs.accepted_node)])
        expected = type(expected)(root, theirs.stream_logits)
        got = type(got)(root, ours.stream_logits)
    assert longest > accepts, "no draft was ever accepted: the commit was not tested"


def lucky_tree(reference, root, rng):
    """A random tree in which the first child of each of some nodes is what the model chooses there."""
    tree = random_tree(rng, reference.limits.num_nodes, root, VOCAB)
    for _ in range(2):
        verified = reference.step(tree)
        for node, chosen in zip(verified.kept, verified.chosen, strict=True):
            children = tree.children(int(node))
            if children and chosen not in tree.tokens:
                tree.tokens[children[0]] = chosen
    return tree


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    "settings",
    [
        {"num_nodes": 8},
        {"num_nodes": 7, "num_kept": 4},
        {"num_nodes": 8, "num_kept": 5, "prune_over": "vocabulary"},
    ],
    ids=str,
)
def test_steps_equal_the_reference(mlx_base, name, settings):
    reference, model = models(mlx_base, VARIANTS[name], **settings)
    follow(reference, model, np.random.default_rng(7))


@pytest.mark.parametrize("name", ["values turned", "top keys"])
def test_streams_of_the_accepted_node_alone_equal_the_reference(mlx_base, name):
    reference, _ = models(mlx_base, VARIANTS[name], num_nodes=8, num_kept=5)
    adapter = random_adapter(mlx_base, VARIANTS[name])
    model = mlx_model(mlx_base, adapter, num_kept=5, bucket=32, stream_rows="accepted")
    follow(reference, model, np.random.default_rng(8))


@pytest.mark.parametrize("stream_rows", ["kept", "accepted"])
def test_top_keys_under_soft_caps_and_windows(tmp_path, stream_rows):
    """A family whose scores are capped and of whose layers some see a window.

    Its random model repeats what it reads, which no tree of different tokens holds.
    """
    base = make_base("gemma2", tmp_path)
    config = SpeculativeConfig(num_streams=2, num_msa_layers=2, stream_top_keys=3, value_rotation=0.3)
    reference, _ = models(base, config, num_nodes=8)
    model = mlx_model(base, random_adapter(base, config), bucket=32, stream_rows=stream_rows)
    follow(reference, model, np.random.default_rng(9), accepts=0)


@pytest.mark.parametrize("attends", [False, True])
def test_shared_mode_text_equals_the_reference_and_plain_decoding(mlx_base, attends):
    reference, model = models(mlx_base, SHARED[attends], num_nodes=6, num_kept=4)
    texts = [
        [t for step in decode(m, Drafter(n), PROMPT, 30) for t in step.tokens]
        for m, n in ((reference, 6), (model, 6), (model, 1))
    ]
    assert texts[0] == texts[1] == texts[2]
