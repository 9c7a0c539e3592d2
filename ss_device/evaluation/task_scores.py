"""An application's metric over generated texts, with what its rows allow to be measured beside it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ss_device.application import Application
from ss_device.evaluation.bootstrap import mean_interval
from ss_device.evaluation.metrics import score
from ss_device.evaluation.prompts import Question
from ss_device.evaluation.slot_errors import count_slot_errors
from ss_device.evaluation.sql_execution import execution_match


def task_scores(app: Application, texts: Sequence[str], questions: Sequence[Question]) -> dict:
    """The metric's figures and intervals (`metrics.score`) of one text per question.

    With `schema`: `execution_match`, the share of answers whose result over synthesised tables is the
    reference's, and `executable_references`, how many references SQLite can run. With `slots`: the
    counts of `count_slot_errors`. Rows without those fields (of ready prompts) are not measured so.
    """
    result = score(app.metric, texts, [q.references for q in questions], app.over_references)
    if app.schema and _have(questions, app.schema):
        found = [
            execution_match(q.row[app.schema], text, q.references[0])
            for text, q in zip(texts, questions, strict=True)
        ]
        values = [float(f) for f in found if f is not None]
        result["executable_references"] = len(values)
        if values:
            result["execution_match"] = round(float(np.mean(values)), 4)
            result["execution_match_interval"] = [round(v, 4) for v in mean_interval(values)]
    if app.slots and _have(questions, app.slots):
        pairs = [(q.row[app.slots], text) for text, q in zip(texts, questions, strict=True)]
        result["slot_errors"] = count_slot_errors(pairs)
    return result


def _have(questions: Sequence[Question], field: str) -> bool:
    return all(isinstance(question.row.get(field), str) for question in questions)
