"""Sampled speculation: the plain distribution, and the plain text under keyed noise."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ss_device.acceptance import walk
from ss_device.decoding import Drafter, decode
from ss_device.errors import UserError
from ss_device.sampling import Sampler, Sampling, TypicalAcceptance
from ss_device.step_model import Proposal, StepLimits, Verified

VOCAB, LENGTH = 4, 3


class Markov:
    """A step model whose logits depend on the last token only; its drafts are the truth or nonsense."""

    limits = StepLimits(num_nodes=8, num_kept=8, num_streams=2, context=40)

    def __init__(self, greedy_only=False):
        rng = np.random.default_rng(5)
        self.table = rng.normal(0, 1, (VOCAB, VOCAB)).astype(np.float32)
        self.streams = rng.normal(0, 1, (2, VOCAB)).astype(np.float32)
        if greedy_only:
            self.limits = StepLimits(8, 8, 2, 40, greedy_only=True)

    def prefill(self, tokens, choose=None):
        chosen = choose(np.arange(1), self.table[list(tokens[-1:])])
        return Proposal(int(chosen[0]), self.streams)

    def step(self, tree, choose=None):
        kept = np.arange(tree.num_nodes)
        chosen = choose(kept, self.table[tree.tokens])
        return Verified(kept, chosen, walk(tree, kept, chosen)[-1], self.streams)

    def commit(self, path):
        pass


def texts(model, drafter, build_sampler, count):
    for number in range(count):
        steps = decode(model, drafter, [0], LENGTH, sampler=build_sampler(number))
        yield tuple(token for step in steps for token in step.tokens)


def exact_distribution(model, sampling):
    """Probability of every text of LENGTH tokens, by the chain rule."""
    found = {(): 1.0}
    for _ in range(LENGTH):
        found = {
            (*text, token): p * q
            for text, p in found.items()
            for token, q in enumerate(sampling.probabilities(model.table[text[-1] if text else 0]))
            if q > 0
        }
    return found


@pytest.mark.parametrize(
    ("settings", "drafter"),
    [
        ({"temperature": 0.8}, Drafter(8)),
        ({"temperature": 1.5, "top_k": 3}, Drafter(3, "chain")),
        ({"top_p": 0.7, "min_p": 0.1}, Drafter(8)),
        ({"temperature": 0.8}, Drafter(1)),
    ],
)
def test_texts_follow_the_plain_distribution(settings, drafter):
    """Chi-square over all texts of three tokens, 2000 seeds, p 0.0005."""
    model, count = Markov(), 2000
    expected = exact_distribution(model, Sampling(**settings))
    seen = Counter(texts(model, drafter, lambda seed: Sampler(Sampling(**settings, seed=seed)), count))
    assert set(seen) <= set(expected)
    common = [text for text, p in expected.items() if p * count >= 5]
    observed = np.array([seen[text] for text in common] + [count - sum(seen[t] for t in common)])
    wanted = np.array([expected[t] * count for t in common])
    wanted = np.append(wanted, max(count - wanted.sum(), 1e-9))
    cells = wanted >= 1
    statistic = ((observed - wanted)[cells] ** 2 / wanted[cells]).sum()
    freedom = cells.sum() - 1
    # Wilson and Hilferty's approximation of the chi-square quantile, z = 3.29.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.29 * np.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


def test_drafts_save_calls_without_changing_the_text():
    model = Markov()
    sampler = Sampler(Sampling(temperature=0.7, seed=11))
    runs = {}
    for drafter in (Drafter(1), Drafter(8)):
        steps = list(decode(model, drafter, [0], 30, sampler=sampler))
        runs[drafter.num_nodes] = (len(steps), [t for s in steps for t in s.tokens])
    assert runs[1][1] == runs[8][1] and runs[8][0] < runs[1][0]


def test_processors_see_each_nodes_own_text():
    """Every text a processor sees must be a beginning of the final one."""
    seen = []

    def forbid_last(text, logits):
        seen.append(tuple(text))
        return np.where(np.arange(VOCAB) == text[-1], -np.inf, logits)

    runs = set()
    for drafter in (Drafter(1), Drafter(8)):
        steps = decode(Markov(), drafter, [0], 20, sampler=Sampler(processors=(forbid_last,)))
        text = (0, *(t for s in steps for t in s.tokens))
        assert all(a != b for a, b in zip(text, text[1:], strict=False))
        assert all(t == text[: len(t)] for t in seen if len(t) <= len(text))
        runs.add(text)
        seen.clear()
    assert len(runs) == 1


def test_greedy_back_ends_refuse_a_sampler():
    with pytest.raises(UserError, match="greedily inside its graph"):
        next(decode(Markov(greedy_only=True), Drafter(8), [0], 5, sampler=Sampler(Sampling())))
    with pytest.raises(UserError, match="temperature"):
        Sampler(lossy_typical=TypicalAcceptance())
    with pytest.raises(UserError, match="epsilon"):
        TypicalAcceptance(epsilon=0.0)
