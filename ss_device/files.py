"""Files on disk: digests, and tensors with clear errors."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from ss_device.errors import UserError, one_line


def sha256(*paths: Path) -> str:
    """Hex digest over the bytes of the files, in the order given. UserError if one is not a plain file."""
    digest = hashlib.sha256()
    for path in paths:
        if not path.is_file():  # a pipe would never end
            raise UserError(f"{path}: no such file, or not a plain file")
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def check_plain(folder: Path) -> None:
    """Raise UserError for a pipe, socket or device in a folder that a library is about to read.

    A library that opens one waits forever, or reads without end.
    """
    for entry in sorted(folder.iterdir()):
        if entry.exists() and not entry.is_file() and not entry.is_dir():
            raise UserError(f"{entry}: not a plain file")


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Tensors of a safetensors file. A missing, truncated or foreign file is a UserError."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({one_line(error)})") from error
