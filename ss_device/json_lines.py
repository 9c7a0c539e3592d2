"""Rows of JSON lines files, plain or gzipped, with file and line named in every error."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from ss_device.errors import UserError, one_line
from ss_device.strict_json import decode_object

LINE_LIMIT = 1 << 26
"""Bytes of a row: a conversation of 64 MB is a damaged file, or a file that is no JSON lines."""


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
    for number, line in read_lines(path):
        where = f"{path}:{number}"
        yield Row(decode_object(line, where), where)


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number (from 1) and bytes of every line that is not blank; a damaged gzip file is a UserError."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            number = 0
            while line := file.readline(LINE_LIMIT + 1):
                number += 1
                if len(line) > LINE_LIMIT:
                    raise UserError(f"{path}:{number}: a line of more than {LINE_LIMIT} bytes")
                if line.strip():
                    yield number, line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: not a complete gzip file ({one_line(error)})") from error


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
