"""Task metrics against sums by hand, several references, bootstrap intervals."""

from __future__ import annotations

import numpy as np
import pytest

from ss_device.errors import UserError
from ss_device.evaluation.bootstrap import mean_interval
from ss_device.evaluation.metrics import exact_match, metric, prompt_scores, score


def test_rouge_by_hand():
    """text "the cat sat", reference "the cat lay down": 2 of 3 and 4 words, 1 of 2 and 3 pairs."""
    values = prompt_scores("rouge", ["The cat sat"], [["the cat lay down"]])
    assert values["rouge1"][0] == pytest.approx(2 * 2 / (3 + 4))
    assert values["rouge2"][0] == pytest.approx(2 * 1 / (2 + 3))
    assert values["rougeLsum"][0] == pytest.approx(2 * 2 / (3 + 4))


def test_rouge_lsum_takes_sentences_apart():
    """Swapped sentences match whole at summary level; as one sequence only one of them would."""
    assert prompt_scores("rouge", ["a b c. d e f."], [["d e f. a b c."]])["rougeLsum"] == [1.0]


def test_best_and_mean_over_references():
    texts, references = ["a b", "x"], [["a b", "a c"], ["y"]]
    best = score("rouge", texts, references, "best")
    mean = score("rouge", texts, references, "mean")
    assert best["rouge1"] == pytest.approx(0.5) and mean["rouge1"] == pytest.approx(0.375)
    assert score("exact_match", texts, references)["exact_match"] == 0.5
    assert score("none", texts, references) == {}


def test_exact_match_and_metric_by_name():
    assert exact_match([" a", "b"], ["a ", "c"]) == 0.5
    assert metric("rouge")(["a b"], ["a b"]) == 1.0
    with pytest.raises(UserError, match="'bleu'"):
        metric("bleu")


def test_interval_is_seeded_ordered_and_as_wide_as_theory_says():
    values = np.random.default_rng(3).random(400)
    low, high = mean_interval(values, seed=1)
    assert (low, high) == mean_interval(values, seed=1) != mean_interval(values, seed=2)
    half = 1.96 * values.std() / np.sqrt(400)
    assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.1 * half)
    assert mean_interval([0.25] * 9) == (0.25, 0.25)
