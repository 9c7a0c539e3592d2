"""docs/method.md, Invariants: the reference on random tiny models against Hugging Face and itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from ss_device.config import SpeculativeConfig, paper_config
from ss_device.decoding import Drafter, decode
from ss_device.reference.step_model import ReferenceStepModel, node_scores
from ss_device.reference.stream_model import attach_adapter, load_base, load_stream_model
from ss_device.step_model import Proposal
from ss_device.tree import keep_best_nodes, root_only, tree_from_parents
from tests.tiny_models import VOCAB, make_tiny_base, random_adapter

CONTEXT = 96

LOSSLESS = {
    "paper": paper_config(num_streams=3, num_msa_layers=2),
    "all-layers": paper_config(num_streams=2, num_msa_layers=3, stream_position="same"),
    "plus": SpeculativeConfig(
        num_streams=4, num_msa_layers=2, stream_mlp="base", stream_lora_rank=3, stream_lora_alpha=6,
        bigram_rank=4, stream_init_rank=2,
    ),
    "no-pruning-head": SpeculativeConfig(num_streams=2, num_msa_layers=1, pruning_rank=0),
    "value-rotation": paper_config(num_streams=3, num_msa_layers=2, value_rotation=0.4),
    "top-keys": paper_config(num_streams=3, num_msa_layers=2, stream_top_keys=3),
}  # fmt: skip
SHARED = {
    "v1": paper_config("shared", num_streams=3, num_msa_layers=2, lora_rank=4, lora_alpha=8),
    "v2": paper_config(
        "shared", num_streams=3, num_msa_layers=2, lora_rank=4, lora_alpha=8, main_attends_streams=True
    ),
}
DRAFTERS = {
    "plain": Drafter(1),
    "chain": Drafter(4, "chain"),
    "best-first": Drafter(9),
    "k-ary": Drafter(15, "k-ary", tree_top_k=2),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_base(tmp_path_factory.mktemp("base"))


def prompt_ids(seed: int, length: int = 11) -> list[int]:
    return [1, *np.random.default_rng(seed).integers(3, VOCAB, length - 1).tolist()]


def generate(model, drafter, prompt, max_tokens=24, stop=frozenset({2})) -> list[int]:
    return [t for step in decode(model, drafter, prompt, max_tokens, stop) for t in step.tokens]


def huggingface_generate(base, prompt, max_tokens=24) -> list[int]:
    model = load_base(base)
    out = model.generate(torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


class Oracle:
    """A step model whose stream logits are replaced: mixtures of the true continuation and noise.

    Random streams are hardly ever right; this makes long acceptances and branching certain.
    """

    def __init__(self, model, truth: list[int], seed: int = 0, strengths=(0.0, 3.0, 6.0)) -> None:
        self.model, self.truth, self.limits = model, truth, model.limits
        self.strengths = strengths
        self.rng = np.random.default_rng(seed)
        self.emitted = 0

    def prefill(self, tokens):
        self.emitted = 1
        proposal = self.model.prefill(tokens)
        return Proposal(proposal.root, self.logits(proposal.stream_logits.shape))

    def step(self, tree):
        verified = self.model.step(tree)
        self.emitted += int(tree.depths[verified.accepted_node]) + 1
        return dataclasses.replace(verified, stream_logits=self.logits(verified.stream_logits.shape))

    def commit(self, path):
        self.model.commit(path)

    def logits(self, shape):
        out = self.rng.normal(0, 1, shape).astype(np.float32)
        for depth in range(shape[0]):
            if self.emitted + depth < len(self.truth):
                out[depth, self.truth[self.emitted + depth]] += self.rng.choice(self.strengths)
        return out


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("keep", [None, 5])
def test_lossless_output_is_huggingface_generate(base, name, drafter, keep):
    """Invariants 1 and 2: any tree, any pruning, any adapter."""
    adapter = random_adapter(base, LOSSLESS[name])
    grower = dataclasses.replace(DRAFTERS[drafter], bigram_bias=adapter.bigram_bias())
    nodes = grower.num_nodes
    model = ReferenceStepModel(load_stream_model(base, adapter), nodes, min(keep or nodes, nodes), CONTEXT)
    for seed in range(2):
        prompt = prompt_ids(seed)
        expected = huggingface_generate(base, prompt)
        assert generate(model, grower, prompt) == expected
        oracle = Oracle(model, expected, seed)
        assert generate(oracle, grower, prompt) == expected


def test_accepted_drafts_save_model_calls(base):
    """With the true continuation in the tree a step yields γ + 1 tokens."""
    adapter = random_adapter(base, LOSSLESS["plus"])
    model = ReferenceStepModel(load_stream_model(base, adapter), 5, 5, CONTEXT)
    prompt = prompt_ids(3)
    expected = huggingface_generate(base, prompt)
    oracle = Oracle(model, expected, strengths=(50.0,))
    steps = list(decode(oracle, Drafter(5, "chain"), prompt, 24, frozenset({2})))
    assert [t for s in steps for t in s.tokens] == expected
    assert len(steps) - 1 == int(np.ceil((len(expected) - 1) / 5))


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_shared_output_is_the_model_stepped_one_token_at_a_time(base, name, drafter):
    """Invariant 1 in shared mode: drafts change nothing, with and without main attending streams."""
    adapter = random_adapter(base, SHARED[name])
    stream_model = load_stream_model(base, adapter)
    prompt = prompt_ids(5)
    plain = generate(ReferenceStepModel(stream_model, 1, 1, CONTEXT), Drafter(1), prompt)
    for keep in (None, 4):
        nodes = DRAFTERS[drafter].num_nodes
        model = ReferenceStepModel(stream_model, nodes, min(keep or nodes, nodes), CONTEXT)
        assert generate(Oracle(model, plain), DRAFTERS[drafter], prompt) == plain


def test_shared_mode_without_streams_on_main_is_peft(base):
    """v1: the fine-tuned model alone, as peft runs it."""
    adapter = random_adapter(base, SHARED["v1"])
    stream_model = load_stream_model(base, adapter)
    prompt = prompt_ids(6)
    out = stream_model.base.generate(
        input_ids=torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0
    )
    model = ReferenceStepModel(stream_model, 9, 9, CONTEXT)
    assert generate(model, Drafter(9), prompt) == out[0, len(prompt) :].tolist()


def random_tree(rng, nodes: int):
    parents = [-1] + [int(rng.integers(0, v)) for v in range(1, nodes)]
    return tree_from_parents(rng.integers(3, VOCAB, nodes), parents)


@pytest.mark.parametrize("tied", [True, False])
def test_tree_logits_equal_the_path_as_a_sequence(tmp_path, tied):
    """Invariant 3, against Hugging Face, after several commits; depth up to the tree's size."""
    base = make_tiny_base(tmp_path, seed=4, tie_word_embeddings=tied, num_key_value_heads=1)
    adapter = random_adapter(base, LOSSLESS["plus"])
    model = ReferenceStepModel(load_stream_model(base, adapter), 12, 12, CONTEXT)
    plain, rng = load_base(base), np.random.default_rng(0)
    text = prompt_ids(9)
    model.prefill(text)
    for _ in range(3):
        tree = random_tree(rng, 12)
        verified = model.step(tree)
        for node in range(tree.num_nodes):
            path = [int(tree.tokens[n]) for n in tree.path(node)]
            with torch.no_grad():
                expected = plain(torch.tensor([text + path])).logits[0, -1].numpy()
            np.testing.assert_allclose(verified.logits[node], expected, rtol=1e-4, atol=1e-4)
        path = tree.path(int(rng.integers(0, 12)))
        model.commit(path)
        text = text + [int(tree.tokens[n]) for n in path]


@pytest.mark.parametrize("name", ["paper", "plus"])
@pytest.mark.parametrize("keep", [12, 6])
def test_cache_after_commit_equals_cache_from_scratch(base, name, keep):
    """Invariant 4, with and without pruning."""
    model = ReferenceStepModel(
        load_stream_model(base, random_adapter(base, LOSSLESS[name])), 12, keep, CONTEXT
    )
    rng, text = np.random.default_rng(1), prompt_ids(2)
    model.prefill(text)
    for _ in range(3):
        tree = random_tree(rng, 12)
        verified = model.step(tree)
        path = tree.path(int(rng.choice(verified.kept)))
        model.commit(path)
        text = text + [int(tree.tokens[n]) for n in path]
    committed = model.cache
    model.prefill(text)
    for (keys, values), (other_keys, other_values) in zip(committed, model.cache, strict=True):
        torch.testing.assert_close(keys, other_keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values, other_values, rtol=1e-4, atol=1e-5)


def test_streams_change_no_other_position(base):
    """Invariant 6: main logits do not depend on the streams; fewer streams are a prefix of more."""
    adapter = random_adapter(base, LOSSLESS["plus"])
    fewer = dataclasses.replace(
        adapter,
        config=dataclasses.replace(adapter.config, num_streams=2),
        tensors={**adapter.tensors, "stream_embeddings": adapter.tensors["stream_embeddings"][:2]},
    )
    tree, prompt = random_tree(np.random.default_rng(3), 8), prompt_ids(1)
    outcomes = []
    for candidate in (adapter, fewer):
        model = ReferenceStepModel(load_stream_model(base, candidate), 8, 8, CONTEXT)
        model.prefill(prompt)
        outcomes.append(model.step(tree))
    many, few = outcomes
    np.testing.assert_allclose(many.logits, few.logits, rtol=0, atol=1e-6)
    np.testing.assert_allclose(many.stream_logits[:2], few.stream_logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prune_over", ["draft", "vocabulary"])
def test_pruned_set_holds_the_root_and_is_closed_under_ancestors(base, prune_over):
    """Invariant 7; K = N is a no-op."""
    adapter = random_adapter(base, LOSSLESS["paper"])
    stream_model = load_stream_model(base, adapter)
    for seed in range(20):
        tree = random_tree(np.random.default_rng(seed), 16)
        model = ReferenceStepModel(stream_model, 16, 6, CONTEXT, prune_over)
        model.prefill(prompt_ids(seed))
        kept = model.step(tree).kept
        assert kept[0] == 0 and len(kept) == 6
        assert all(tree.parents[v] in kept for v in kept[1:])
    whole = ReferenceStepModel(stream_model, 16, 16, CONTEXT, prune_over)
    whole.prefill(prompt_ids(0))
    assert whole.step(tree).kept.tolist() == list(range(16))


def test_early_exit_scores_by_hand(base):
    """The edge score is the early exit's probability of the child given its parent."""
    adapter = random_adapter(base, LOSSLESS["paper"])
    model = load_stream_model(base, adapter)
    tree = tree_from_parents([5, 9, 7, 9, 11], [-1, 0, 0, 1, 1])
    hidden = torch.randn(5, base.architecture.hidden_size, generator=torch.manual_seed(0))
    with torch.no_grad():
        parts, decoder = model.parts.pruning, model.base.model
        z = decoder.norm(hidden + (hidden @ parts.a.T) @ parts.b.T) @ decoder.embed_tokens.weight.T
        full = node_scores(model, hidden, tree, "vocabulary")
        drafted = node_scores(model, hidden, tree, "draft")
    log_probs = z.log_softmax(-1)
    assert full[3] == pytest.approx(float(log_probs[0, 9] + log_probs[1, 9]), abs=1e-4)
    among = z[:, [9, 7, 9, 11]].log_softmax(-1)
    assert drafted[4] == pytest.approx(float(among[0, 0] + among[1, 3]), abs=1e-4)
    assert drafted[0] == 0.0
    assert keep_best_nodes(np.array([0.0, -1.0, -1.0, -2.0]), 2).tolist() == [0, 1]


def test_stop_token_and_context_end_the_text(base):
    """No token after a stop id, none beyond the context; the last cache slot is used."""
    adapter = random_adapter(base, LOSSLESS["plus"])
    model = ReferenceStepModel(load_stream_model(base, adapter), 9, 9, 20)
    prompt = prompt_ids(4)
    steps = list(decode(model, Drafter(9), prompt, 100))
    tokens = [t for s in steps for t in s.tokens]
    assert len(tokens) == 20 - len(prompt) + 1 and steps[-1].finish_reason == "length"
    stop = tokens[4]
    steps = list(decode(model, Drafter(9), prompt, 100, frozenset({stop})))
    assert [t for s in steps for t in s.tokens] == tokens[: tokens.index(stop) + 1]
    assert steps[-1].finish_reason == "stop"


def test_an_adapter_from_arrays_equals_one_from_disk(base):
    adapter = random_adapter(base, LOSSLESS["plus"])
    model = attach_adapter(load_base(base), base.architecture, adapter)
    tree = root_only(7)
    outcomes = []
    for stream_model in (model, load_stream_model(base, adapter)):
        step_model = ReferenceStepModel(stream_model, 1, 1, CONTEXT)
        step_model.prefill(prompt_ids(0))
        outcomes.append(step_model.step(tree).stream_logits)
    np.testing.assert_array_equal(*outcomes)
