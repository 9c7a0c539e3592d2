"""Test prompts of an application: every prompt once, with all its references."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ss_device.application import Application
from ss_device.training.examples import load_prompts


@dataclass(frozen=True)
class Question:
    """A prompt's text, its first row, and what a generated text is compared with."""

    text: str
    row: dict
    references: tuple[str, ...]


def load_test_prompts(app: Application, source: Path | str, limit: int, seed: int = 0) -> list[Question]:
    """`limit` prompts of a source, drawn by `seed`; rows that share a prompt are one (E2E, DialogSum).

    Raises UserError naming file and line of a row without prompt or reference.
    """
    # In file order, so that the draw depends on the prompts alone.
    grouped: dict[str, tuple[dict, list[str]]] = {}
    pairs = load_prompts(app, source, None, seed)
    back = np.argsort(np.random.default_rng(seed).permutation(len(pairs)))
    for index in back:
        text, row = pairs[index]
        wanted = [] if app.metric == "none" else app.references(row)
        grouped.setdefault(text, (row, []))[1].extend(wanted)
    prompts = [Question(text, row, tuple(dict.fromkeys(refs))) for text, (row, refs) in grouped.items()]
    order = np.random.default_rng(seed).permutation(len(prompts))[:limit]
    return [prompts[i] for i in order]
