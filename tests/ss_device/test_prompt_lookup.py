"""Prompt lookup against counting by hand, and its drafts against plain decoding."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ss_device.decoding import Drafter, decode
from ss_device.errors import UserError
from ss_device.prompt_lookup import NgramHistory, PromptLookup, PromptLookupChain, lookup_tree
from ss_device.reference.step_model import ReferenceStepModel
from ss_device.reference.stream_model import attach_adapter
from ss_device.step_model import Proposal
from ss_device.tree import BigramBias, best_first_tree
from tests.tiny_models import make_tiny_base, random_adapter

TEXT = [3, 1, 4, 1, 2, 3, 1, 4, 2, 3, 1]
NONE = frozenset()


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def mixed_probability(text, path, token, base, settings):
    """p_n(token) by scanning the text; w_n is the prior n / (n + 3). base: the stream's probability."""
    whole = [*text, *path]
    value = base
    for order in range(1, settings.max_match + 1):
        suffix = whole[-order:]
        after = [text[i + order] for i in range(len(text) - order) if text[i : i + order] == suffix]
        if after:
            weight = order / (order + 3)
            value = weight * after.count(token) / len(after) + (1 - weight) * value
    return value


@pytest.mark.parametrize("streams", [0, 2])
@pytest.mark.parametrize("nodes", [4, 12])
def test_tree_is_the_most_probable_set_under_the_mixture(nodes, streams):
    """Brute force over every path of a vocabulary of 5 to depth 4, two levels below the last stream."""
    rng = np.random.default_rng(nodes)
    logits = rng.normal(0, 1, (streams, 5)).astype(np.float32)
    bias = BigramBias(rng.normal(0, 1, (5, 3)), rng.normal(0, 1, (5, 3)))
    settings = PromptLookup(max_match=3, max_depth=4)
    probability = {}
    for depth in (1, 2, 3, 4):
        for path in itertools.product(range(5), repeat=depth):
            value, parent = 1.0, TEXT[-1]
            for level, token in enumerate(path):
                drafted = level < streams
                base = softmax((logits[level] + bias(parent)).astype(np.float64))[token] if drafted else 0
                value *= mixed_probability(TEXT, path[:level], token, base, settings)
                parent = token
            if value > 0:
                probability[path] = value
    best = sorted(probability, key=lambda p: -probability[p])[: nodes - 1]
    tree = lookup_tree(TEXT[-1], logits, nodes, NgramHistory(settings, TEXT), bias)
    drawn = [tuple(int(tree.tokens[n]) for n in tree.path(v)[1:]) for v in range(1, tree.num_nodes)]
    found = [probability[path] for path in drawn]
    np.testing.assert_allclose(found, [probability[path] for path in best], rtol=1e-5)
    assert len(set(drawn)) == len(best)


def test_text_without_repetition_leaves_the_streams_tree():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (3, 9)).astype(np.float32)
    bias = BigramBias(rng.normal(0, 1, (9, 3)), rng.normal(0, 1, (9, 3)))
    plain = best_first_tree(8, logits, 12, bias)
    mixed = lookup_tree(8, logits, 12, NgramHistory(PromptLookup(), [8]), bias)
    for name in ("tokens", "parents", "depths"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(mixed, name))


def test_weights_follow_the_output():
    history = NgramHistory(PromptLookup(max_match=2, prior_strength=1.0), [1, 2, 1])
    assert history.weight(1) == pytest.approx(1 / 4) and history.weight(2) == pytest.approx(2 / 5)
    history.extend([2])  # 1 was followed by 2 before: right; no longer match
    assert history.weight(1) == pytest.approx((1 / 4 + 1) / 2)
    history.extend([3])  # 2 was followed by 1, as was (1, 2): both wrong
    assert history.weight(1) == pytest.approx((1 / 4 + 1) / 3)
    assert history.weight(2) == pytest.approx((2 / 5) / 2)
    promised, left = NgramHistory(PromptLookup(max_match=1), [1, 2, 1, 2, 1, 3, 1]).predict(())
    assert promised == pytest.approx({2: 1 / 6, 3: 1 / 12}) and left == pytest.approx(3 / 4)


def test_a_long_copy_goes_below_the_last_stream_and_stops_where_it_must():
    text = [*range(10, 20), 10, 11, 12]
    proposal = Proposal(12, np.zeros((2, 30), np.float32))
    drafter = Drafter(6, "chain", lookup=PromptLookup())
    history = drafter.start(text)
    assert drafter.grow(proposal, NONE, 9, history).tokens.tolist() == [12, 13, 14, 15, 16, 17]
    assert drafter.grow(proposal, NONE, 3, history).tokens.tolist() == [12, 13, 14, 15]
    assert drafter.grow(proposal, frozenset({14}), 9, history).tokens.tolist() == [12, 13, 14]
    assert drafter.grow(proposal, frozenset({12}), 9, history).num_nodes == 1
    shallow = Drafter(6, "chain", lookup=PromptLookup(max_depth=2))
    assert shallow.grow(proposal, NONE, 9, shallow.start(text)).num_nodes == 3
    alone = Drafter(30, lookup=PromptLookup(), use_streams=False)
    assert set(alone.grow(proposal, NONE, 30, alone.start(text)).tokens.tolist()) <= set(text)


def test_equal_n_gram_drafts_go_to_the_lower_id():
    history = NgramHistory(PromptLookup(), [5, 7, 5, 3, 5])
    tree = lookup_tree(5, np.zeros((0, 9), np.float32), 3, history, max_depth=1)
    assert tree.tokens.tolist() == [5, 3, 7]


def test_plain_prompt_lookup_takes_the_latest_longest_match():
    proposal = Proposal(2, np.zeros((0, 9), np.float32))
    drafter = PromptLookupChain(num_nodes=4)

    def draft(text, depth=9, stops=NONE):
        return drafter.grow(proposal, stops, depth, drafter.start(text)).tokens.tolist()

    assert draft([1, 2, 5, 6, 2, 7, 1, 2]) == [2, 5, 6, 2]  # (1, 2) is longer than the later (2)
    assert draft([2, 5, 2, 6, 2]) == [2, 6, 2]  # the later one of two, to the end of the text
    assert draft([1, 2, 5, 6, 2, 7, 1, 2], depth=1) == [2, 5]
    assert draft([1, 2, 5, 6, 2, 7, 1, 2], stops=frozenset({5})) == [2, 5]
    assert draft([1, 2]) == [2]


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: PromptLookup(max_match=0), "max_match"),
        (lambda: PromptLookup(max_depth=0), "max_depth"),
        (lambda: PromptLookup(prior_strength=0.0), "prior_strength"),
        (lambda: Drafter(4, "k-ary", lookup=PromptLookup()), "k-ary"),
        (lambda: Drafter(4, use_streams=False), "prompt lookup"),
    ],
)
def test_settings_that_cannot_be(make, word):
    with pytest.raises(UserError, match=word):
        make()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import LlamaForCausalLM

    from ss_device.config import SpeculativeConfig

    base = make_tiny_base(tmp_path_factory.mktemp("lookup") / "base")
    config = SpeculativeConfig(num_streams=2, num_msa_layers=2, bigram_rank=4)
    adapter = random_adapter(base, config)
    network = LlamaForCausalLM.from_pretrained(base.path).eval().requires_grad_(False)
    return ReferenceStepModel(attach_adapter(network, base.architecture, adapter), 12), adapter


@pytest.mark.parametrize(
    ("drafter", "at_least"),
    [
        (Drafter(12, lookup=PromptLookup()), 3),
        (Drafter(12, "chain", lookup=PromptLookup()), 3),
        (Drafter(12, lookup=PromptLookup(), use_streams=False), 3),
        (PromptLookupChain(), 1),  # the latest match of a run ends one token later
    ],
)
def test_output_is_that_of_plain_decoding(model, drafter, at_least):
    """A random model repeats itself soon, so n-grams are accepted, some below the last stream."""
    steps, longest = model[0], 0
    for seed in range(4):
        prompt = np.random.default_rng(seed).integers(3, 250, 9).tolist()
        plain = [t for s in decode(steps, Drafter(1), prompt, 60) for t in s.tokens]
        records = list(decode(steps, drafter, prompt, 60))
        assert [t for s in records for t in s.tokens] == plain
        longest = max(longest, *(s.num_drafted for s in records))
    assert longest >= at_least
