"""Stop strings over token ids: which token completes one, and the text before it."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer


def stop_length(ids: Sequence[int], tokenizer: Tokenizer, strings: Sequence[str]) -> int | None:
    """The smallest n such that the text of `ids[:n]` holds a stop string; None when none is there."""
    if not strings or not _holds(ids, tokenizer, strings):
        return None
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _holds(ids[:middle], tokenizer, strings) else (middle + 1, high)
    return low


def text_before_stop(ids: Sequence[int], tokenizer: Tokenizer, strings: Sequence[str]) -> str:
    """The text of `ids` without special tokens, cut at the first stop string."""
    text = tokenizer.decode(list(ids), skip_special_tokens=True)
    found = [at for s in strings if (at := text.find(s)) >= 0]
    return text[: min(found)] if found else text


def _holds(ids: Sequence[int], tokenizer: Tokenizer, strings: Sequence[str]) -> bool:
    text = tokenizer.decode(list(ids), skip_special_tokens=True)
    return any(s in text for s in strings)
