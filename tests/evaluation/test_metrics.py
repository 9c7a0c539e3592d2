"""Task metrics against sums by hand, several references, bootstrap intervals."""

from __future__ import annotations

import numpy as np
import pytest

from ss_device.application import load_application
from ss_device.evaluation.bootstrap import mean_interval
from ss_device.evaluation.metrics import prompt_scores, score
from ss_device.evaluation.prompts import Question
from ss_device.evaluation.repetition import repeats
from ss_device.evaluation.task_scores import task_scores


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
    assert score("exact_match", [" a", "b"], [["a "], ["c"]])["exact_match"] == 0.5
    assert score("none", texts, references) == {}


def test_sql_answers_exact_in_any_case_and_without_literals():
    reference = 'SELECT a FROM t WHERE b = "x" AND c > 3'
    texts = [
        reference,
        'select A from t  where B = "X" and c > 3',
        'SELECT a FROM t WHERE b = "y" AND c > 4.5',
        'SELECT a FROM t WHERE c = "x" AND c > 3',
    ]
    values = prompt_scores("sql", texts, [[reference]] * 4)
    assert values["exact_match"] == [1, 0, 0, 0]
    assert values["any_case_match"] == [1, 1, 0, 0]
    assert values["skeleton_match"] == [1, 1, 1, 0]


def test_what_rows_allow_is_measured_beside_the_metric():
    sql = load_application("sqlctx")
    row = {"context": "CREATE TABLE t (a VARCHAR, b INTEGER, c INTEGER)"}
    answers = ["SELECT a FROM t WHERE c > 3 AND b = 1", "SELECT a FROM t WHERE b = 1", "no SQL"]
    questions = [Question("q", row, ("SELECT a FROM t WHERE b = 1 AND c > 3",))] * 3
    found = task_scores(sql, answers, questions)
    assert found["executable_references"] == 3 and found["exact_match"] == 0
    assert found["execution_match"] == pytest.approx(1 / 3, abs=1e-4)
    e2e = load_application("e2e_nlg")
    told = Question("p", {"mr": "name[Strada], food[Italian]"}, ("Strada serves Italian food.",))
    found = task_scores(e2e, ["Strada serves Chinese food."], [told])
    assert found["slot_errors"]["wrong"] == 1 and found["slot_errors"]["slots"] == 2
    assert "execution_match" not in found
    ready = Question("p", {"prompt": "p"}, ("SELECT 1",))
    assert task_scores(sql, ["SELECT 1"], [ready]).keys().isdisjoint({"execution_match"})


def test_texts_that_repeat_themselves():
    assert repeats([1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3, 4, 5, 6, 7, 8])
    assert not repeats([1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 9]) and not repeats([])


def test_interval_is_seeded_ordered_and_as_wide_as_theory_says():
    values = np.random.default_rng(3).random(400)
    low, high = mean_interval(values, seed=1)
    assert (low, high) == mean_interval(values, seed=1) != mean_interval(values, seed=2)
    half = 1.96 * values.std() / np.sqrt(400)
    assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.1 * half)
    assert mean_interval([0.25] * 9) == (0.25, 0.25)
