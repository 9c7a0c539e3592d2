"""Whether a stretch of base training that ended has left what it was for: the model, or a held state."""

from __future__ import annotations

import json
from pathlib import Path

from ss_device.outputs import write_text
from ss_device.strict_json import read_json
from ss_device.training.base_run import Progress

WRITTEN = "written.json"


def mark_written(run: Path, progress: Progress) -> None:
    """Take note that the model of this step stands under the output's name."""
    write_text(run / WRITTEN, json.dumps({"step": progress.step}) + "\n")


def has_ended(run: Path, output: Path, progress: Progress) -> bool:
    """Whether nothing of the stretch is left to do. One that was killed before it wrote its model is not
    over: resumed, it writes that."""
    if progress.done() < 1:
        return False
    if progress.stretch.budget.hold:
        held = run / "held" / "record.json"
        return held.is_file() and read_json(held).get("step") == progress.step
    mark = run / WRITTEN
    return output.is_dir() and mark.is_file() and read_json(mark).get("step") == progress.step
