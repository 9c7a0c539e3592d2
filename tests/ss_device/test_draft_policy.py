"""Drafts sized by expected tokens against seconds: rules by hand, learning, streams that are put off."""

from __future__ import annotations

import numpy as np
import pytest

from ss_device.decoding import decode
from ss_device.draft_policy import (
    NUM_BINS,
    NUM_CELLS,
    AdaptiveDrafter,
    Experience,
    Reliability,
    StepCosts,
    StreamGains,
)
from ss_device.errors import UserError
from ss_device.prompt_lookup import NgramHistory, NgramTrust, PromptLookup, mixed_children
from ss_device.step_model import DeferredProposal, Proposal, StepLimits, Verified
from ss_device.tree import grow_with_probabilities

VOCAB, NONE = 30, frozenset()
REPEATING = [*range(10, 20), 10, 11, 12]


def costs(node=0.001, streams=0.005, step=0.01, most=8):
    return StepCosts((1, most), (step, step + node * (most - 1)), streams)


def experience(tokens=3.0, seconds=0.012, rate=150.0, **parts):
    return Experience(rate, ((tokens, seconds),) * NUM_CELLS, **parts)


def sharp(token, gamma=2):
    """Stream logits that are sure of one token at every depth."""
    logits = np.zeros((gamma, VOCAB), np.float32)
    logits[:, token] = 20.0
    return logits


class Asked:
    """Counts how often streams are read."""

    def __init__(self, logits):
        self.logits, self.times = logits, 0

    def __call__(self):
        self.times += 1
        return self.logits


def grown(drafter, streams, text=REPEATING, depth=9):
    history = drafter.start(text)
    return drafter.grow(DeferredProposal(text[-1], streams), NONE, depth, history)


def test_a_tree_grows_while_nodes_are_cheaper_than_what_they_bring():
    for node, nodes in ((1e-6, 8), (1.0, 1)):
        drafter = AdaptiveDrafter(8, costs(node), experience(), streams="never")
        assert grown(drafter, Asked(None)).num_nodes == nodes
    children = mixed_children(np.zeros((0, 0)), NgramHistory(PromptLookup(), REPEATING), None, 8)
    full, probabilities = grow_with_probabilities(12, 8, children, NONE, 9)
    sizes = set()
    for threshold in (0.3, 0.5, 0.7):  # λ · seconds of a node
        drafter = AdaptiveDrafter(8, costs(threshold / 150), experience(), streams="never")
        tree = grown(drafter, Asked(None))
        assert tree.num_nodes == 1 + np.sum(probabilities[1:] > threshold)
        assert tree.tokens.tolist() == full.first(tree.num_nodes).tokens.tolist()
        sizes.add(tree.num_nodes)
        assert grown(drafter, Asked(None), depth=1).num_nodes <= 2
        assert grown(drafter, Asked(None), depth=0).num_nodes == 1
    assert len(sizes) > 1


def test_streams_are_read_where_they_pay_and_tried_again_where_they_do_not():
    nothing_to_copy = [1, 2, 3]
    cheap, dear = Asked(sharp(7)), Asked(sharp(7))
    drafter = AdaptiveDrafter(8, costs(streams=1e-4), experience())
    assert grown(drafter, cheap, nothing_to_copy).tokens.tolist() == [3, 7, 7] and cheap.times == 1
    drafter = AdaptiveDrafter(8, costs(streams=10.0), experience())
    sizes = [grown(drafter, dear, nothing_to_copy).num_nodes for _ in range(2 * drafter.PROBE_AFTER)]
    assert dear.times == 2 and set(sizes[:-1]) == {1, 3} and sizes[-1] == 3


def test_streams_that_bring_nothing_are_left_out_after_a_while():
    drafter, streams = AdaptiveDrafter(8, costs(), experience()), Asked(sharp(7))
    read = []
    for _ in range(200):
        history, before = drafter.start([1, 2, 3]), streams.times
        drafter.grow(DeferredProposal(3, streams), NONE, 9, history)
        history.extend([5])  # no draft was right
        read.append(streams.times > before)
    assert all(read[:5]) and sum(read[40:]) <= 2 * 160 / drafter.PROBE_AFTER
    learned = drafter.experience()
    assert learned.rate < 110 and learned.gains[0][0] < 2 and learned.streams[0] < 0.6
    again = AdaptiveDrafter(8, costs(), learned)
    assert grown(again, streams, [1, 2, 3]).num_nodes == 1


def test_what_is_left_of_streams_drafts_for_nothing():
    """After a wrong first token the other streams still say what may follow."""
    logits = np.zeros((4, VOCAB), np.float32)
    logits[np.arange(4), [20, 21, 22, 23]] = 30.0
    drafter, streams = AdaptiveDrafter(8, costs(), experience()), Asked(logits)
    history = drafter.start([1, 2, 3])

    def draft(root):
        return drafter.grow(DeferredProposal(root, streams), NONE, 9, history).tokens.tolist()

    assert draft(3) == [3, 20, 21, 22, 23] and streams.times == 1
    history.extend([9])
    assert draft(9) == [9, 21, 22, 23] and streams.times == 1
    history.extend([21, 22, 5])  # two were right; below 5 no stream is left
    assert draft(5)[:4] == [5, 20, 21, 22] and streams.times == 2
    drafter.start([1])
    assert drafter.experience().gains[0] == pytest.approx(((12 * 3 + 4) / 13, (12 * 0.012 + 0.027) / 13))


def test_right_drafts_are_trusted_more():
    drafter = AdaptiveDrafter(8, costs(), experience(), streams="always")
    for _ in range(30):
        history = drafter.start([1, 2, 3])
        tree = drafter.grow(Proposal(3, sharp(7)), NONE, 9, history)
        assert tree.tokens.tolist()[:3] == [3, 7, 7]
        history.extend([7, 7, 4])
    learned = drafter.experience()
    assert learned.gains[0][0] == pytest.approx(3.0) and learned.streams[0] == pytest.approx(1.0, abs=1e-3)
    assert learned.rate > 160


def test_reliability_by_hand():
    bins = Reliability((1.0,) * NUM_BINS)
    bins.MEMORY = 1.0
    bins.observe(np.array([0.9, 0.6, 0.3]), np.array([True, False, True]))
    assert bins.ratios[:2] == pytest.approx([(12 + 1) / (12 + 1.5), (12 + 1) / (12 + 0.3)])
    assert bins.corrected(np.array([0.8, 0.01])) == pytest.approx([0.8 * 13 / 13.5, 0.01])
    gains = StreamGains(((2.0, 0.01),) * NUM_CELLS)
    gains.observe(1, 6, 0.03)
    assert gains.mean(0) == (2.0, 0.01)
    assert gains.mean(1) == pytest.approx(((12 * 2 + 6) / 13, (12 * 0.01 + 0.03) / 13))


def test_costs_between_measured_sizes_never_fall():
    table = StepCosts((1, 2, 4), (1.0, 3.0, 2.0), 0.5).up_to(6)
    assert table.tolist() == [1.0, 3.0, 3.0, 3.0, 3.0, 3.0]


def test_trust_by_hand():
    trust = NgramTrust()
    trust.observe({5: 0.5, 6: 0.25}, 5)
    assert trust.ratio(5) == pytest.approx(2 / 1.5) and trust.ratio(6) == pytest.approx(1 / 1.25)
    assert trust.ratio(7) == 1.0 and trust.ratios() == {}
    fewer, left = trust.correct({6: 0.5})
    assert fewer == pytest.approx({6: 0.4}) and left == pytest.approx(0.6)
    most, left = trust.correct({5: 0.9})
    assert most == pytest.approx({5: 0.98}) and left == pytest.approx(0.02)
    for _ in range(200):
        trust.observe({6: 1.0}, 5)
    assert trust.ratio(6) < 0.05
    known = NgramTrust(trust.ratios())
    assert known.ratio(6) == pytest.approx(trust.ratio(6), abs=0.1)


def test_tokens_that_n_grams_never_get_right_lose_their_place():
    """After 1 2 the text once went on with 3; generations that went on otherwise are remembered."""
    trust = NgramTrust()
    for _ in range(20):
        NgramHistory(PromptLookup(), [1, 2, 3, 4, 1, 2], trust).extend([9])
    fresh, _ = NgramHistory(PromptLookup(), [1, 2, 3, 4, 1, 2]).predict(())
    taught, left = NgramHistory(PromptLookup(), [1, 2, 3, 4, 1, 2], trust).predict(())
    assert taught[3] < 0.3 * fresh[3] and left == pytest.approx(1 - sum(taught.values()))


def test_no_node_below_the_least_probability():
    def halves(path):
        return np.array([1, 2]), np.log([0.5, 0.25])

    tree, found = grow_with_probabilities(0, 20, halves, NONE, 5, least=np.full(20, 0.2))
    assert found.tolist() == pytest.approx([1, 0.5, 0.25, 0.25]) and tree.num_nodes == 4
    assert tree.first(2).tokens.tolist() == [0, 1]
    least = np.array([0.2, 0.2, 0.3, 0.0])  # a tree of three is joined by nodes of 0.3 and more
    assert grow_with_probabilities(0, 4, halves, NONE, 5, least)[0].num_nodes == 3


class Counting:
    """Says 3, 4, 5, … and drafts it; counts the passes. Puts streams off when asked to."""

    limits = StepLimits(16, 16, 2, 99, defers_streams=True)

    def __init__(self):
        self.passes = {"step": 0, "streams": 0}

    def prefill(self, tokens, choose=None, defer=False):
        self.last = int(tokens[-1])
        return Proposal(self.last + 1, self._drafts(defer))

    def step(self, tree, choose=None, defer=False):
        self.passes["step"] += 1
        accepted = 0
        for node in range(1, tree.num_nodes):
            if tree.parents[node] == accepted and tree.tokens[node] == tree.tokens[accepted] + 1:
                accepted = node
        self.next = int(tree.tokens[accepted])
        return Verified(np.arange(tree.num_nodes), tree.tokens + 1, accepted, self._drafts(defer))

    def commit(self, path):
        self.last = self.next

    def streams(self):
        self.passes["streams"] += 1
        logits = np.zeros((2, 200), np.float32)
        logits[0, self.last + 2] = logits[1, self.last + 3] = 20.0
        return logits

    def _drafts(self, defer):
        return np.zeros((0, 0), np.float32) if defer else self.streams()


@pytest.mark.parametrize("streams", ["always", "never", "when they pay"])
def test_the_loop_computes_streams_only_when_asked(streams):
    model = Counting()
    drafter = AdaptiveDrafter(8, costs(), experience(), streams=streams)
    tokens = [t for step in decode(model, drafter, [1, 2], 31) for t in step.tokens]
    assert tokens == list(range(3, 34))
    passes = {"step": 30, "streams": 0} if streams == "never" else {"step": 10, "streams": 10}
    assert model.passes == passes


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: StepCosts((2, 4), (1.0, 1.0), 0.0), "ascending"),
        (lambda: StepCosts((1, 2), (1.0,), 0.0), "ascending"),
        (lambda: StepCosts((1,), (0.0,), 0.0), "positive"),
        (lambda: Experience(1.0, ((1.0, 1.0),)), "gains"),
        (lambda: experience(rate=float("nan")), "positive"),
        (lambda: experience(lookup=(1.0,)), "ratios"),
        (lambda: AdaptiveDrafter(0, costs(), experience()), "at least 1 node"),
        (lambda: AdaptiveDrafter(2, costs(), experience(), streams="often"), "when they pay"),
    ],
)
def test_settings_that_cannot_be(make, word):
    with pytest.raises(UserError, match=word):
        make()
