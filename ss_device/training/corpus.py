"""Documents for pre-training, as token ids: application rows, another model's continuations of prompts
(`ss-train distill`), plain text, repeated random spans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from ss_device.application import load_application
from ss_device.errors import UserError
from ss_device.json_lines import Row, located, read_json_lines, source_of
from ss_device.training.recipe import Source

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"


@dataclass(frozen=True)
class Document:
    """Token ids [length] of one document; the first `prompt_length` of them are prompt.

    spans: generated stretches [first, end) in order, for texts of several turns; None: all that
    follows the prompt.
    """

    ids: np.ndarray
    prompt_length: int
    spans: tuple[tuple[int, int], ...] | None = None

    @property
    def generated(self) -> tuple[tuple[int, int], ...]:
        """The generated stretches [first, end), in order."""
        return ((self.prompt_length, len(self.ids)),) if self.spans is None else self.spans


def source_texts(source: Source, data: Path) -> Iterator[tuple[str, str]]:
    """Yield (prompt, completion) texts of a source; the prompt is empty for plain text."""
    app = load_application(source.app) if source.kind == "application" else None
    for row in source_rows(source, data):
        try:
            yield (app.prompt(row), app.completion_text(row)) if app else ("", _plain_text(row))
        except UserError as error:
            raise located(error, row) from error


def source_rows(source: Source, data: Path) -> Iterator[Row]:
    """Rows of a source's file, those that its `include` and `exclude` leave."""
    for row in read_json_lines(data / source.path):
        tag = source_of(row)
        if tag not in source.exclude and (not source.include or tag in source.include):
            yield row


def _plain_text(row: dict) -> str:
    if not isinstance(row.get("text"), str):
        raise UserError(f"the row has no text 'text' (found {', '.join(row) or 'nothing'})")
    return row["text"]


def tokenized_documents(
    source: Source, data: Path, tokenizer: Tokenizer, max_length: int
) -> list[Document]:
    """All documents of an application or text source, BOS first and EOS last.

    Application rows longer than `max_length` tokens are dropped (a cut completion would teach not to
    stop); plain text is cut into pieces of `max_length`.
    """
    if source.kind == "continuations":
        return _continuations(source, data, tokenizer, max_length)
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    pairs = list(source_texts(source, data))
    prompts = tokenizer.encode_batch_fast([p for p, _ in pairs], add_special_tokens=False)
    completions = tokenizer.encode_batch_fast([c for _, c in pairs], add_special_tokens=False)
    documents = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = [bos, *prompt.ids, *completion.ids, eos]
        if source.kind == "application":
            if len(ids) <= max_length:
                documents.append(Document(np.array(ids, np.int32), 1 + len(prompt.ids)))
            continue
        for start in range(0, len(ids), max_length):
            piece = np.array(ids[start : start + max_length], np.int32)
            documents.append(Document(piece, 0))
    if not documents:
        raise UserError(f"{data / source.path}: no document of at most {max_length} tokens")
    return documents


def _continuations(source: Source, data: Path, tokenizer: Tokenizer, max_length: int) -> list[Document]:
    """Rows of `ss-train distill` (`prompt`, `completion_ids`) of at most `max_length` tokens."""
    path, bos, documents = data / source.path, tokenizer.token_to_id(BOS), []
    for row in read_json_lines(path):
        prompt, completion = row.get("prompt"), row.get("completion_ids")
        if not isinstance(prompt, str) or not isinstance(completion, list):
            problem = UserError("expected 'prompt' and 'completion_ids', as `ss-train distill` writes them")
            raise located(problem, row)
        if any(not isinstance(i, int) or not 0 <= i < tokenizer.get_vocab_size() for i in completion):
            problem = f"'completion_ids' are not ids of a tokenizer of {tokenizer.get_vocab_size()} tokens"
            raise located(UserError(problem), row)
        start = [bos, *tokenizer.encode(prompt, add_special_tokens=False).ids]
        if len(start) + len(completion) <= max_length:
            documents.append(Document(np.array([*start, *completion], np.int32), len(start)))
    if not documents:
        raise UserError(f"{path}: no document of at most {max_length} tokens")
    return documents


def repeated_spans(
    count: int, vocab_size: int, rng: np.random.Generator, bos: int, eos: int
) -> list[Document]:
    """`count` documents `bos span span eos` of random tokens; the first copy carries no loss."""
    documents = []
    for _ in range(count):
        span = rng.integers(3, vocab_size, size=int(rng.integers(12, 64)))
        ids = np.concatenate([[bos], span, span, [eos]]).astype(np.int32)
        documents.append(Document(ids, 1 + len(span)))
    return documents
