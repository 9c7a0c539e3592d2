"""Rows of JSON lines files, plain or gzipped, with file and line named in every error."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from ss_device.errors import UserError


def read_json_lines(path: Path | str) -> Iterator[dict]:
    """Yield the objects of a `.jsonl` or `.jsonl.gz` file.

    Raises UserError for a missing file and for a line that is not a JSON object, by file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}:{number}: not valid JSON ({error.msg})") from error
            if not isinstance(row, dict):
                raise UserError(f"{path}:{number}: expected a JSON object")
            yield row
