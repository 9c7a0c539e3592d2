"""Task metrics on generated text: exact match and ROUGE, several references per prompt, intervals."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from ss_device.evaluation.bootstrap import mean_interval
from ss_device.sql_text import evened, without_literals

ROUGE = ("rouge1", "rouge2", "rougeLsum")


def score(
    name: str,
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    over_references: str = "best",
    seed: int = 0,
) -> dict:
    """Mean of every figure of the metric, and its 95 % bootstrap interval under `<figure>_interval`.

    Values in [0, 1], rounded to 4 places; empty for metric `none`.
    """
    if name == "none":
        return {}
    result: dict = {}
    for figure, values in prompt_scores(name, predictions, references, over_references).items():
        result[figure] = round(float(np.mean(values)), 4)
        result[f"{figure}_interval"] = [round(v, 4) for v in mean_interval(values, seed=seed)]
    return result


def prompt_scores(
    name: str,
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    over_references: str = "best",
) -> dict[str, list[float]]:
    """Figure name → one value per prompt, the best over its references or their mean.

    ROUGE-1, ROUGE-2 and ROUGE-Lsum are F1 values of the `rouge-score` package (Lin 2004), without
    stemming; for Lsum every sentence stands on its own line.
    """
    if len(predictions) != len(references) or not references:
        raise ValueError("as many predictions as references are needed, and at least one")
    values = {"exact_match": _exact_match, "sql": _sql_match, "rouge": _rouge()}[name]
    combine = {"best": max, "mean": lambda scores: sum(scores) / len(scores)}[over_references]
    collected: dict[str, list[float]] = {}
    for text, wanted in zip(predictions, references, strict=True):
        each = [values(text, reference) for reference in wanted]
        for figure in each[0]:
            collected.setdefault(figure, []).append(combine([e[figure] for e in each]))
    return collected


def _exact_match(text: str, reference: str) -> dict[str, float]:
    return {"exact_match": float(text.strip() == reference.strip())}


def _sql_match(text: str, reference: str) -> dict[str, float]:
    """Exact, in any letter case (as WikiSQL's own accuracy), and with literals masked."""
    return {
        **_exact_match(text, reference),
        "any_case_match": float(evened(text) == evened(reference)),
        "skeleton_match": float(without_literals(text) == without_literals(reference)),
    }


def _rouge() -> Callable[[str, str], dict[str, float]]:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE), use_stemmer=False)

    def values(text: str, reference: str) -> dict[str, float]:
        scores = scorer.score(_one_sentence_a_line(reference), _one_sentence_a_line(text))
        return {figure: scores[figure].fmeasure for figure in ROUGE}

    return values


def _one_sentence_a_line(text: str) -> str:
    return re.sub(r"(?<=[.!?])\s+", "\n", text.strip())
