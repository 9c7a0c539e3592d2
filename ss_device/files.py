"""Files on disk: hashes, tensors with clear errors, and folders that appear whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from ss_device.errors import UserError, one_line


def sha256(*paths: Path) -> str:
    """Hex digest over the bytes of the files, in the order given."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Tensors of a safetensors file. A missing, truncated or foreign file is a UserError."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        return load_file(path)
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({one_line(error)})") from error


def read_json(path: Path) -> dict:
    """A JSON object. A missing or malformed file is a UserError."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({one_line(error)})") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object")
    return value


def check_writable(path: Path) -> None:
    """Raise UserError unless a file of this name can be written, before the work that it is to hold."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder, a file is written")
    if not path.parent.is_dir():
        raise UserError(f"{path.parent}: no such folder")
    try:
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


@contextmanager
def folder_in_one_go(target: Path, keep_partial: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `target` that replaces it only when the block succeeds.

    An earlier `target` stays untouched until then. With `keep_partial` the temporary folder outlives a
    failure, so that a rerun can reuse its finished stages; it is never named like a result.
    """
    temporary = target.with_name(f".{target.name}.partial")
    previous = target.with_name(f".{target.name}.previous")
    if previous.exists() and not target.exists():  # killed between the two renames below
        os.replace(previous, target)
    if not keep_partial:
        shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
    except BaseException:
        if not keep_partial:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(previous, ignore_errors=True)
    if target.exists():
        os.replace(target, previous)
    os.replace(temporary, target)
    shutil.rmtree(previous, ignore_errors=True)
