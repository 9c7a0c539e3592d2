"""Test prompts of an application: every prompt once, with all its references."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from ss_device.application import Application
from ss_device.architecture import Architecture
from ss_device.errors import UserError
from ss_device.evaluation.settings import PromptSettings
from ss_device.training.examples import encode_prompts, load_prompts


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


@dataclass(frozen=True)
class DrawnPrompts:
    """Questions with their token ids, in the same order, and how many were left out as too long."""

    questions: list[Question]
    ids: list[list[int]]
    left_out: int


def fitting_prompts(
    app: Application,
    source: Path | str,
    settings: PromptSettings,
    tokenizer: Tokenizer,
    shape: Architecture,
) -> DrawnPrompts:
    """The drawn prompts, without those of more than `longest_prompt` tokens.

    By default a prompt may be as long as leaves room for the longest answer in the context. UserError when
    none is left.
    """
    drawn = load_test_prompts(app, source, settings.limit)
    pairs = [(q.text, q.row) for q in drawn]
    encoded = encode_prompts(app, pairs, tokenizer, shape.bos_id, shape.end_id, shape.vocab_size)
    room = settings.longest_prompt or shape.max_positions - settings.longest_answer(app)
    kept = [(q, ids) for q, ids in zip(drawn, encoded, strict=True) if len(ids) <= room]
    if not kept:
        raise UserError(f"{source}: no prompt of at most {room} tokens")
    return DrawnPrompts([q for q, _ in kept], [ids for _, ids in kept], len(drawn) - len(kept))
