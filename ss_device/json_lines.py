"""Rows of JSON lines files, plain or gzipped, with file and line named in every error."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

from ss_device.errors import UserError


class Row(dict):
    """A data row that knows where it stands (`file:line`), for errors found later."""

    def __init__(self, fields: dict, where: str) -> None:
        super().__init__(fields)
        self.where = where


def read_json_lines(path: Path | str) -> Iterator[Row]:
    """Yield the objects of a `.jsonl` or `.jsonl.gz` file; blank lines are skipped.

    Raises UserError for a missing or unreadable file and for a line that is not a JSON object, by
    file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield Row(_object(line, f"{path}:{number}"), f"{path}:{number}")
    except (gzip.BadGzipFile, EOFError) as error:
        raise UserError(f"{path}: not a whole gzip file ({error})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}:{number + 1}: not UTF-8 text ({error.reason})") from error


def _object(line: str, where: str) -> dict:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg})") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object")
    return row


def source_of(row: dict) -> str:
    """What a row's `source` says before the first slash; empty without one."""
    return str(row.get("source", "")).split("/")[0]


def located(error: UserError, row: dict) -> UserError:
    """The same error with the row's place in front, where it is known."""
    where = getattr(row, "where", "")
    return UserError(f"{where}: {error}" if where else str(error))


def drop_torn_line(path: Path) -> int:
    """Cut what follows the last line end, the trace of a killed writer; returns the bytes removed."""
    with path.open("r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            first = max(0, end - (1 << 16))
            file.seek(first)
            at = file.read(end - first).rfind(b"\n")
            if at >= 0:
                end = first + at + 1
                break
            end = first
        file.truncate(end)
    return size - end
