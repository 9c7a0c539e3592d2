"""Rows of an application as token ids: prompts, and documents whose generated spans are marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from ss_device.application import Application
from ss_device.base_model import BaseFolder
from ss_device.conversation import Piece
from ss_device.errors import UserError
from ss_device.json_lines import located
from ss_device.token_ids import check_token_ids
from ss_device.tokenizer_file import read_tokenizer
from ss_device.training.corpus import Document
from ss_device.training.rows import Source, read_rows
from ss_device.training.settings import ExampleSettings


def load_prompts(
    app: Application, source: Source, limit: int | None = None, seed: int = 0
) -> list[tuple[str, dict]]:
    """(prompt text, row) of a source (`read_rows`), shuffled by `seed` and cut to `limit` rows.

    Rows with a `prompt` field are taken as they are. Raises UserError with file and line number for
    a row without the application's fields, and for an empty source.
    """
    pairs = [(_prompt_text(app, row), row) for row in read_rows(app, source)]
    if not pairs:
        raise UserError(f"{source}: no rows" if isinstance(source, str | Path) else "data: no rows")
    order = np.random.default_rng(seed).permutation(len(pairs))[:limit]
    return [pairs[i] for i in order]


def _prompt_text(app: Application, row: dict) -> str:
    if "prompt_ids" in row:  # a distilled history: it has no text of its own
        return ""
    try:
        text = row["prompt"] if "prompt" in row else app.prompt(row)
        if not isinstance(text, str):
            raise UserError(f"field 'prompt' is {type(text).__name__}, expected text")
        return text
    except UserError as error:
        raise located(error, row) from error


def encode_prompts(
    app: Application,
    pairs: Sequence[tuple[str, dict]],
    tokenizer: Tokenizer,
    bos_id: int | None,
    eos_id: int,
    vocab_size: int | None = None,
) -> list[list[int]]:
    """Token ids of what precedes a row's (last) generated text: [bos] prompt, or a whole history.

    Raises UserError, in all functions here, for an id that a model of `vocab_size` tokens does not have.
    """
    prompts = []
    for text, row in pairs:
        if "prompt_ids" in row:
            prompts.append(list(row["prompt_ids"]))
        elif app.kind == "chat" and "prompt" not in row:
            ids, spans = _encode_pieces(app, app.pieces(row), tokenizer, bos_id, eos_id)
            prompts.append(ids[: spans[-1][0]])
        else:
            start = [] if bos_id is None else [bos_id]
            prompts.append([*start, *tokenizer.encode(text, add_special_tokens=False).ids])
        _check_ids(prompts[-1], row, vocab_size)
    return prompts


def _check_ids(ids: Sequence[int], row: dict, vocab_size: int | None) -> None:
    """Raise UserError, with the row's place, for an id outside the vocabulary."""
    try:
        if vocab_size is not None:
            check_token_ids(ids, vocab_size, "the row")
    except UserError as error:
        raise located(error, row) from error


def encode_examples(
    app: Application,
    pairs: Sequence[tuple[str, dict]],
    tokenizer: Tokenizer,
    bos_id: int | None,
    eos_id: int,
    max_length: int,
    vocab_size: int | None = None,
) -> list[Document]:
    """Documents `[bos] prompt completion eos`; those longer than `max_length` tokens are left out.

    A row's `completion_ids` (written by distillation, end token included) win over its text. A
    conversation has one generated span per assistant turn, each with its end token, and is cut after
    the last whole turn that fits. Raises UserError when nothing fits.
    """
    documents, shortest = [], None
    for text, row in pairs:
        ids, spans = _encode_row(app, text, row, tokenizer, bos_id, eos_id)
        _check_ids(ids, row, vocab_size)
        shortest = min(shortest or spans[0][1], spans[0][1])
        fitting = [s for s in spans if s[1] <= max_length and s[1] > s[0]]
        if fitting and (app.kind == "chat" or len(ids) <= max_length):
            kept = np.array(ids[: fitting[-1][1]], np.int32)
            documents.append(Document(kept, fitting[0][0], tuple(fitting)))
    if not documents:
        raise UserError(
            f"application '{app.name}': none of {len(pairs)} rows fits into {max_length} tokens "
            f"(the shortest needs {shortest})"
        )
    return documents


def read_examples(
    app: Application, base: BaseFolder, source: Source, settings: ExampleSettings, seed: int
) -> list[Document]:
    """The documents of a source that a base can be trained on, in an order fixed by `seed`.

    UserError as `load_prompts` and `encode_examples`, and for longer examples than the base's context.
    """
    shape = base.architecture
    pairs = load_prompts(app, source, settings.limit, seed)
    longest = settings.longest(shape.max_positions)
    tokenizer = read_tokenizer(base.path)
    return encode_examples(app, pairs, tokenizer, shape.bos_id, shape.end_id, longest, shape.vocab_size)


def _encode_row(app, text, row, tokenizer, bos_id, eos_id) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of a whole row and its generated spans [first, end)."""
    if "completion_ids" in row:
        completion = row["completion_ids"]
        if not isinstance(completion, list) or not all(isinstance(i, int) for i in completion):
            raise located(UserError("field 'completion_ids' is not a list of token ids"), row)
        prompt = encode_prompts(app, [(text, row)], tokenizer, bos_id, eos_id)[0]
        return [*prompt, *completion], [(len(prompt), len(prompt) + len(completion))]
    if "prompt" in row and app.kind == "pair":
        try:
            pieces = [Piece(text, False), Piece(app.completion_text(row), True)]
        except UserError as error:
            raise located(error, row) from error
    else:
        pieces = app.pieces(row)
    return _encode_pieces(app, pieces, tokenizer, bos_id, eos_id)


def _encode_pieces(app, pieces, tokenizer, bos_id, eos_id) -> tuple[list[int], list[tuple[int, int]]]:
    """Pieces are encoded one by one, as they are at generation time; generated ones get the end token.

    The tokenizer's own chat template brings start and end tokens itself: there, a span ends with the
    first end token and what follows it (a line end, say) is given, not generated.
    """
    by_template = app.chat is not None and app.chat.from_tokenizer
    ids: list[int] = [] if bos_id is None or by_template else [bos_id]
    spans = []
    for piece in pieces:
        tokens = tokenizer.encode(piece.text, add_special_tokens=False).ids
        if not piece.generated:
            ids += tokens
            continue
        if eos_id not in tokens:
            tokens = [*tokens, eos_id]
        spans.append((len(ids), len(ids) + tokens.index(eos_id) + 1))
        ids += tokens
    return ids, spans


def encode_turns(
    app: Application,
    pairs: Sequence[tuple[str, dict]],
    tokenizer: Tokenizer,
    bos_id: int | None,
    eos_id: int,
    vocab_size: int | None = None,
) -> list[list[int]]:
    """Token ids of what precedes every assistant turn of conversations, their own history included."""
    prompts = []
    for _, row in pairs:
        ids, spans = _encode_pieces(app, app.pieces(row), tokenizer, bos_id, eos_id)
        _check_ids(ids, row, vocab_size)
        prompts.extend(ids[:first] for first, _ in spans)
    return prompts
