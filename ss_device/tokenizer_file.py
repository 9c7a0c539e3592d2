"""tokenizer.json of a base model, read by the tokenizers library."""

from __future__ import annotations

import string
from pathlib import Path

from tokenizers import Tokenizer

from ss_device.errors import UserError, library_errors
from ss_device.native_output import native_output_dropped

PROBE = f"{string.printable}é漢🙂\ue000"
"""Text of every kind: a tokenizer must encode whatever a user writes."""


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a base model's folder or a bundle.

    What its file may say of padding, truncation and merges that are left out at random is for training
    encoders: a prompt is encoded whole, and always to the same tokens.

    Raises UserError for a missing or damaged tokenizer.json, and one that cannot encode every text.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    with native_output_dropped():
        with library_errors(f"{path}: not a readable tokenizer"):
            tokenizer = Tokenizer.from_file(str(path))
            tokenizer.no_padding()
            tokenizer.no_truncation()
            if getattr(tokenizer.model, "dropout", None):
                tokenizer.model.dropout = None
        with library_errors(f"{path}: cannot encode every text"):
            tokenizer.encode_batch_fast([PROBE], add_special_tokens=False)
    return tokenizer
