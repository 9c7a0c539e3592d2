"""Tokens of a base's tokenizer that have no row in its embedding: the model cannot read them."""

from __future__ import annotations

from pathlib import Path

from ss_device.errors import UserError
from ss_device.strict_json import read_json


def notes(tokenizer: Path, vocab_size: int) -> list[str]:
    """One line for people, or none. tokenizer: a tokenizer.json; vocab_size: rows of the embedding."""
    beyond = {i: text for text, i in _tokens(tokenizer) if not 0 <= i < vocab_size}
    if not beyond:
        return []
    first = min(beyond)
    return [
        f"tokens of the tokenizer beyond the embedding of {vocab_size} rows: {len(beyond)} (the first: "
        f"{beyond[first]!r}, id {first}); prompts that need them are refused"
    ]


def _tokens(tokenizer: Path) -> list[tuple[str, int]]:
    """Text and id of every token, the added ones too. UserError for a file that is no tokenizer."""
    raw = read_json(tokenizer)
    try:
        vocabulary = raw["model"]["vocab"]
        if isinstance(vocabulary, dict):
            found = list(vocabulary.items())
        else:  # unigram: pieces and their scores, in the order of their ids
            found = [(piece, index) for index, (piece, _) in enumerate(vocabulary)]
        found += [(token["content"], token["id"]) for token in raw.get("added_tokens") or ()]
        if all(isinstance(text, str) and type(index) is int for text, index in found):
            return found
    except (KeyError, TypeError, ValueError):
        pass
    raise UserError(f"{tokenizer}: not a readable tokenizer (no vocabulary of texts and ids)")
