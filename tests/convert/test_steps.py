"""Every kind of adapter against the reference, in float32 (docs/method.md, Invariants): Core ML packages on
the executor, Core AI assets on Apple's runtime."""

from __future__ import annotations

import numpy as np
import pytest

from ss_convert.coreml.convert import GraphOptions
from ss_convert.graph import streams, tables
from ss_convert.graph.options import PRESETS
from ss_device.config import SpeculativeConfig, paper_config
from ss_device.decoding import Drafter, decode
from ss_device.errors import UserError
from ss_device.sampling import Sampler, Sampling
from ss_device.tree import root_only, tree_from_parents
from tests.convert.cases import (
    CHUNK,
    CONTEXT,
    EACH_TARGET,
    MAKE,
    TOLERANCE,
    Pair,
    committed_cache,
    compare_caches,
    compare_steps,
    forced_tree,
    make_pair,
    plain_text,
    prompt_ids,
)
from tests.tiny_models import make_tiny_base, random_adapter

STREAM_PLUS = {
    "stream_mlp": "base",
    "stream_init_rank": 3,
    "stream_lora_rank": 6,
    "stream_lora_alpha": 9.0,
    "stream_position": "same",
}
LORA = {"lora_rank": 4, "lora_alpha": 8.0}

CASES = {
    "paper": (paper_config(num_msa_layers=2), GraphOptions(8, 8, CONTEXT, CHUNK)),
    "ss+, pruned over the draft": (
        SpeculativeConfig(num_msa_layers=2, num_streams=3, **STREAM_PLUS),
        GraphOptions(9, 5, CONTEXT, CHUNK),
    ),
    "all layers MSA, adapter with stream LoRA, pruned over the vocabulary": (
        SpeculativeConfig(num_msa_layers=3, stream_lora_rank=4, stream_lora_alpha=4.0),
        GraphOptions(8, 4, CONTEXT, 16, "vocabulary"),
    ),
    "values turned in place of embeddings, f": (
        SpeculativeConfig(num_msa_layers=2, num_streams=3, value_rotation=0.5, stream_init_rank=2),
        GraphOptions(8, 5, CONTEXT, CHUNK),
    ),
    "shared": (
        paper_config("shared", num_msa_layers=2, **LORA),
        GraphOptions(7, 4, CONTEXT, CHUNK),
    ),
    "shared, main attends streams": (
        paper_config("shared", num_msa_layers=2, main_attends_streams=True, **LORA),
        GraphOptions(8, 5, CONTEXT, CHUNK),
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_base(tmp_path_factory.mktemp("base") / "tiny", dtype="float16")


@pytest.fixture(scope="module", params=EACH_TARGET)
def target(request) -> str:
    """A Core ML package on the executor, or a Core AI asset on Apple's local runtime."""
    return request.param


@pytest.fixture(scope="module", params=CASES)
def pair(request, base, target, tmp_path_factory) -> Pair:
    config, options = CASES[request.param]
    return make_pair(base, config, options, tmp_path_factory.mktemp("case"), target)


@pytest.fixture(scope="module")
def paper(base, target, tmp_path_factory) -> Pair:
    return make_pair(base, *CASES["paper"], tmp_path_factory.mktemp("paper"), target)


def test_steps_equal_the_reference(pair):
    """Kept, chosen, accepted, stream logits and the cache over forced trees, full and partly filled."""
    n = pair.model.limits.num_nodes
    depths = compare_steps(pair, prompt_ids(11), [n, n, n, n - 1, n, n, 3, 1, n])
    assert max(depths) >= 2 and min(depths) == 0, "the trees should test long and failed drafts"


def test_loop_gives_the_text_of_plain_decoding(pair):
    """Invariant 1, on a reused state: the model's own drafts, then one node at a time."""
    prompt = prompt_ids(9, seed=4)
    drafter = Drafter(pair.model.limits.num_nodes)
    text = [t for s in decode(pair.model, drafter, prompt, 12) for t in s.tokens]
    assert text == plain_text(pair.model, prompt, 12) == plain_text(pair.reference, prompt, 12)


def test_untied_head_and_other_sizes(target, tmp_path):
    base = make_tiny_base(
        tmp_path / "base",
        seed=5,
        dtype="float16",
        tie_word_embeddings=False,
        num_key_value_heads=1,
        head_dim=16,
        rope_theta=500.0,
    )
    config = SpeculativeConfig(num_streams=2, num_msa_layers=1)
    pair = make_pair(base, config, GraphOptions(6, 3, CONTEXT, 5), tmp_path, target)
    compare_steps(pair, prompt_ids(13), [6] * 8)


def test_lossless_text_is_hugging_face_generate(base, paper):
    """Invariant 2: any drafts, the untouched base's greedy text."""
    prompt = prompt_ids(10, seed=7)
    expected = _generate(base, prompt, 24)
    text = [t for s in decode(paper.model, Drafter(8), prompt, 24) for t in s.tokens]
    assert text == expected
    # Drafts that are right now and then take the lazy commit through paths of every length.
    rng, text = np.random.default_rng(3), [paper.model.prefill(prompt).root]
    while len(text) < 20:
        tree = forced_tree(rng, expected[len(text) - 1 :], 8, "binary")
        verified = paper.model.step(tree)
        path = tree.path(verified.accepted_node)
        paper.model.commit(path)
        text += [int(tree.tokens[v]) for v in path[1:]]
        text.append(int(verified.chosen[path[-1]]))
    assert text == expected[: len(text)]


def test_every_node_chooses_as_its_path_alone(base, paper):
    """Invariant 3, against Hugging Face: each node's path as a plain sequence."""
    import torch

    from ss_device.reference.stream_model import load_base

    prompt = prompt_ids(12, seed=2)
    root = paper.model.prefill(prompt).root
    tree = forced_tree(np.random.default_rng(0), [root], 8, "random")
    verified, model = paper.model.step(tree), load_base(base)
    for node in range(8):
        text = prompt + [int(tree.tokens[v]) for v in tree.path(node)]
        with torch.no_grad():
            assert int(model(torch.tensor([text])).logits[0, -1].argmax()) == verified.chosen[node]


def test_cache_after_commits_is_the_cache_from_scratch(base, paper):
    """Invariant 4 within the package: steps and prefill leave the same keys and values."""
    prompt = prompt_ids(10, seed=7)
    expected = _generate(base, prompt, 20)
    paper.model.prefill(prompt)
    for start in (0, 4):
        tree = tree_from_parents(expected[start : start + 4], [-1, 0, 1, 2])
        assert paper.model.step(tree).accepted_node == 3
        paper.model.commit([0, 1, 2, 3])
    stepped = committed_cache(paper.model)
    paper.model.prefill(prompt + expected[:8])
    np.testing.assert_allclose(stepped, committed_cache(paper.model), **TOLERANCE)


def test_first_of_two_equal_siblings_is_followed(paper):
    """As `acceptance.walk` does; the second one's right child must not attract the walk."""
    prompt = prompt_ids(6)
    truth = plain_text(paper.reference, prompt, 4)
    tree = tree_from_parents([truth[0], truth[1], truth[1], truth[2]], [-1, 0, 0, 2])
    for model in (paper.model, paper.reference):
        model.prefill(prompt)
        assert model.step(tree).accepted_node == 1


SAMPLING_FORMS = {
    "plain": {},
    "parts": {"cuts": (1,)},
    "ane": {**PRESETS["ane"], "preset": "ane", "head_split": 128, "pad_state": False},
    "gpu": PRESETS["gpu"],
}


@pytest.fixture(scope="module", params=SAMPLING_FORMS)
def sampling(request, base, target, tmp_path_factory) -> Pair:
    options = GraphOptions(8, 5, CONTEXT, CHUNK, sampling=True, **SAMPLING_FORMS[request.param])
    return make_pair(base, CASES["paper"][0], options, tmp_path_factory.mktemp("sampling"), target)


def test_sampling_form_also_returns_the_kept_nodes_logits(sampling, paper):
    pair, prompt = sampling, prompt_ids(8)
    truth = plain_text(pair.reference, prompt, 6)
    tree = forced_tree(np.random.default_rng(4), truth, 8, "binary")
    pair.model.prefill(prompt)
    pair.reference.prefill(prompt)
    for size in (8, 3):
        part = tree_from_parents(tree.tokens[:size], tree.parents[:size])
        mine, other = pair.model.step(part), pair.reference.step(part)
        assert mine.logits.shape == other.logits.shape and mine.logits.dtype == np.float32
        np.testing.assert_array_equal(mine.logits.argmax(-1), mine.chosen)
        np.testing.assert_allclose(mine.logits, other.logits, **TOLERANCE)
    paper.model.prefill(prompt)
    assert paper.model.step(tree).logits is None
    assert paper.model.limits.greedy_only and not pair.model.limits.greedy_only
    with pytest.raises(UserError, match="no logits to sample from; convert it with --sampling"):
        paper.model.step(tree, second_best)


def second_best(kept, logits) -> np.ndarray:
    """A rule of the host's own: nothing that the graph chooses."""
    return logits.argsort(-1)[:, -2].astype(np.int32)


def test_a_host_that_chooses_drafts_from_the_node_where_its_walk_ends(sampling):
    """Its trees hold its own choices, so that its walks end below the graph's greedy ones."""
    prompt, rng, elsewhere = prompt_ids(11), np.random.default_rng(1), 0
    truth = [sampling.reference.prefill(prompt, second_best).root]
    while len(truth) < CONTEXT - len(prompt):
        truth.append(int(sampling.reference.step(root_only(truth[-1]), second_best).chosen[0]))
        sampling.reference.commit([0])
    models, at = (sampling.model, sampling.reference), 0
    assert [model.prefill(prompt, second_best).root for model in models] == truth[:1] * 2
    for shape in ("chain", "binary", "random") * 2:
        tree = forced_tree(rng, truth[at:], 8, shape)
        greedy = sampling.model.step(tree).accepted_node
        mine, other = (model.step(tree, second_best) for model in models)
        np.testing.assert_array_equal(mine.kept, other.kept)
        np.testing.assert_array_equal(mine.chosen, other.chosen)
        assert mine.accepted_node == other.accepted_node
        np.testing.assert_allclose(mine.stream_logits, other.stream_logits, **TOLERANCE)
        elsewhere += mine.accepted_node != greedy
        path = tree.path(mine.accepted_node)
        for model in models:
            model.commit(path)
        at += len(path)
    assert elsewhere
    compare_caches(sampling)


def test_sampled_text_is_the_reference_s_with_and_without_drafts(sampling):
    """Invariant 5 under keyed noise; the drafts are the same as well."""
    for seed in range(3):
        runs = [
            list(
                decode(
                    model,
                    Drafter(nodes),
                    prompt_ids(9, seed=4),
                    14,
                    sampler=Sampler(Sampling(temperature=1.3, top_k=20, seed=seed)),
                )
            )
            for model in (sampling.model, sampling.reference)
            for nodes in (8, 1)
        ]
        texts = [[token for step in run for token in step.tokens] for run in runs]
        assert texts[0] == texts[1] == texts[2] == texts[3]
        trees = [[step.tree.tokens.tolist() for step in run[1:]] for run in (runs[0], runs[2])]
        assert trees[0] == trees[1] and len(trees[0][0]) == 8
    assert texts[0] != plain_text(sampling.reference, prompt_ids(9, seed=4), 14)


def test_a_step_without_commit_changes_nothing(paper):
    prompt = prompt_ids(6)
    truth = plain_text(paper.model, prompt, 6)
    paper.model.prefill(prompt)
    paper.model.step(forced_tree(np.random.default_rng(1), truth, 8, "binary"))
    again = paper.model.step(tree_from_parents(truth[:4], [-1, 0, 1, 2]))
    assert again.accepted_node == 3
    paper.model.commit([0, 1, 2, 3])
    assert paper.model.step(tree_from_parents(truth[4:5], [-1])).chosen[0] == truth[5]


@pytest.mark.parametrize("length", [1, 2, CHUNK, CHUNK + 1, CHUNK + 2, CONTEXT - 2, CONTEXT])
def test_prompts_of_every_length_up_to_the_full_context(paper, length):
    """Chunks may hang over the end of the context, and text may fill it to the last slot."""
    prompt = prompt_ids(length, seed=length)
    texts = [
        [t for s in decode(model, Drafter(8), prompt, 5) for t in s.tokens]
        for model in (paper.model, paper.reference)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == min(5, CONTEXT - length + 1)


def test_half_precision_runs_the_same_graph(base, target, tmp_path):
    """fp16 rounding may change a token, not the contract: the loop's own check of the walk holds."""
    adapter = random_adapter(base, CASES["paper"][0])
    model = MAKE[target](base, adapter, CASES["paper"][1], tmp_path / "c" / "t", "float16")
    steps = list(decode(model, Drafter(8), prompt_ids(9), 12))
    assert sum(len(s.tokens) for s in steps) == 12
    assert all(np.isfinite(s.verified.stream_logits).all() for s in steps[1:])


def test_broken_packages_are_caught(base, paper, target, tmp_path, monkeypatch):
    """The comparison fails for two weights exchanged and for streams that see later streams."""
    _, options = CASES["paper"]
    weights = base.weights()
    a, b = "layers.2.attn.q.weight", "layers.2.attn.o.weight"
    weights[a], weights[b] = weights[b], weights[a]
    monkeypatch.setattr(type(base), "weights", lambda _: weights)
    broken = MAKE[target](base, paper.adapter, options, tmp_path / "a" / "t")
    with pytest.raises(AssertionError):
        compare_steps(Pair(tmp_path, paper.adapter, broken, paper.reference), prompt_ids(11), [8] * 3)
    monkeypatch.undo()

    def sees_later(config, num_kept):
        mask = tables.own_stream_mask(config, num_kept).copy()
        own = mask[num_kept:]
        own[np.kron(np.eye(num_kept), np.ones((config.num_streams,) * 2)) == 1] = 0
        return mask

    monkeypatch.setattr(streams, "own_stream_mask", sees_later)
    broken = MAKE[target](base, paper.adapter, options, tmp_path / "b" / "t")
    with pytest.raises(AssertionError):
        compare_steps(Pair(tmp_path, paper.adapter, broken, paper.reference), prompt_ids(11), [8] * 3)


def _generate(base, prompt: list[int], count: int) -> list[int]:
    """Greedy text of the untouched base by Hugging Face generate in float32."""
    import torch

    from ss_device.reference.stream_model import load_base

    out = load_base(base).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()
