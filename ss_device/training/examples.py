"""Prompt and completion pairs for adapter training, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from ss_device.application import Application
from ss_device.errors import UserError
from ss_device.json_lines import read_json_lines
from ss_device.training.corpus import Document


def load_prompts(
    app: Application, path: Path, limit: int | None = None, seed: int = 0
) -> list[tuple[str, dict]]:
    """(prompt text, row) of a JSON lines file, shuffled by `seed` and cut to `limit` rows.

    Rows with a `prompt` field are taken as they are. Raises UserError with file and line number for
    a row without the application's fields, and for an empty file.
    """
    pairs = []
    for number, row in enumerate(read_json_lines(path), 1):
        try:
            pairs.append((row["prompt"] if "prompt" in row else app.prompt(row), row))
        except UserError as error:
            raise UserError(f"{path}:{number}: {error}") from error
    if not pairs:
        raise UserError(f"{path}: no rows")
    order = np.random.default_rng(seed).permutation(len(pairs))[:limit]
    return [pairs[i] for i in order]


def encode_examples(
    app: Application,
    pairs: Sequence[tuple[str, dict]],
    tokenizer: Tokenizer,
    bos_id: int | None,
    eos_id: int,
    max_length: int,
) -> list[Document]:
    """Documents `[bos] prompt completion eos`; those longer than `max_length` tokens are left out.

    A row's `completion_ids` (written by distillation, end token included) win over its text.
    """
    start = [] if bos_id is None else [bos_id]
    prompts = tokenizer.encode_batch_fast([p for p, _ in pairs], add_special_tokens=False)
    documents = []
    for prompt, (_, row) in zip(prompts, pairs, strict=True):
        if "completion_ids" in row:
            completion = row["completion_ids"]
        else:
            text = app.completion_text(row)
            completion = [*tokenizer.encode(text, add_special_tokens=False).ids, eos_id]
        ids = [*start, *prompt.ids, *completion]
        if len(ids) <= max_length and len(completion) > 0:
            documents.append(Document(np.array(ids, np.int32), len(start) + len(prompt.ids)))
    if not documents:
        raise UserError(
            f"application '{app.name}': none of {len(pairs)} rows fits into {max_length} tokens"
        )
    return documents
