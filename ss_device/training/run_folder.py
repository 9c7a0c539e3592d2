"""The folder of a training run, `<output>.run/`: settings, log and checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ss_device.errors import UserError


def open_run(folder: Path, settings: dict, resume: bool) -> None:
    """Make the run's folder, or check that the run found there is the one to go on with."""
    path = folder / "settings.json"
    if resume and path.is_file():
        found = json.loads(path.read_text())
        for name in sorted(settings.keys() | found.keys()):
            mine, theirs = settings.get(name), found.get(name)
            if mine != theirs:
                raise UserError(
                    f"{folder}: the run to resume had other settings ({name}: {theirs}, now {mine}); "
                    "give it its own or drop --resume"
                )
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path.write_text(json.dumps(settings, indent=1) + "\n")
