"""The JSON lines log of a training run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

from ss_device.outputs import write_text


def open_log(path: Path, step: int) -> TextIO:
    """The log, opened for appending, without records that a resumed run will write again.

    What a killed run wrote of a line goes as well.
    """
    if path.is_file():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        write_text(path, "".join(line + "\n" for line in lines if _is_of(line, step)))
    return path.open("a", encoding="utf-8")


def _is_of(line: str, last_step: int) -> bool:
    """Whether a line is a whole record of a step up to the last one that is kept."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    step = record.get("step") if isinstance(record, dict) else None
    return isinstance(step, int) and step <= last_step
