"""tokenizer.json of a base model, read by the tokenizers library."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from ss_device.errors import UserError, library_errors


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a base model's folder. A missing or damaged tokenizer.json is a UserError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    with library_errors(f"{path}: not a readable tokenizer"):
        return Tokenizer.from_file(str(path))
