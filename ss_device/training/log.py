"""The JSON lines log of a training run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO


def open_log(path: Path, step: int) -> TextIO:
    """The log, opened for appending, without records that a resumed run will write again."""
    if path.is_file():
        lines = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= step]
        path.write_text("".join(line + "\n" for line in lines))
    return path.open("a")
