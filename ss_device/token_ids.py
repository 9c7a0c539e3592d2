"""Token ids and the vocabulary: an id that has no row in the embedding is refused before any look-up.

Array libraries do not check it: MLX reads whatever lies behind the embedding, numpy counts a negative id
from the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ss_device.errors import UserError


def outside_vocabulary(ids: Sequence[int] | np.ndarray, vocab_size: int) -> list:
    """Those of `ids` [count] that are no whole numbers from 0 to vocab_size − 1, in their order."""
    array = np.asarray(ids)
    if array.dtype.kind in "iu" and array.min(initial=0) >= 0 and array.max(initial=0) < vocab_size:
        return []
    return [i for i in ids if not is_token_id(i, vocab_size)]


def is_token_id(value: object, vocab_size: int) -> bool:
    """Whether `value` is a whole number that has a row in an embedding of `vocab_size` rows."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_whole and 0 <= value < vocab_size


def check_token_ids(ids: Sequence[int] | np.ndarray, vocab_size: int, where: str) -> None:
    """Raise UserError unless all ids lie in the vocabulary. where: what holds them, for the message."""
    if found := outside_vocabulary(ids, vocab_size):
        raise UserError(f"{where}: {outside_text(found[0], vocab_size)}")


def outside_text(token: object, vocab_size: int, text: str | None = None) -> str:
    """What is wrong with a token id, in words. text: how the tokenizer writes it."""
    named = f" ({text!r})" if text else ""
    return (
        f"token id {token}{named} lies outside the model's vocabulary of {vocab_size} tokens "
        f"(0 to {vocab_size - 1})"
    )
