"""The folder of a training run, `<output>.run/`: settings, log and checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ss_device.errors import UserError
from ss_device.outputs import holds_only, output_lock, real_output, write_text
from ss_device.strict_json import read_json

STATES = ("checkpoint", "held", "best")
NAMES = (
    "settings.json",
    "log.jsonl",
    "written.json",
    "tokenizer",
    *STATES,
    *(f"{name}.*" for name in STATES),
    ".*",  # half written, of a killed process
)


def run_folder(output: Path) -> Path:
    """`<output>.run`, beside what the run writes."""
    output = real_output(output)
    return output.with_name(output.name + ".run")


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """Hold the right to write `output` during a whole run; of several processes the first one has it."""
    if int(os.environ.get("RANK", "0")):
        yield
    else:
        with output_lock(output):
            yield


def check_plain_entries(folder: Path) -> None:
    """UserError for anything but plain files and folders in a run's folder.

    Going on with the run would write where a link leads, and wait for who reads a pipe.
    """
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
            kind = "a symbolic link" if entry.is_symlink() else "not a plain file"
            raise UserError(f"{entry}: is {kind}, expected a file or folder of the run")


def check_new_run(folder: Path, force: bool) -> None:
    """UserError where a run may not start again.

    One with a checkpoint is there, unless `force`, or something else than a run.
    """
    if not folder.exists():
        return
    if not folder.is_dir() or not holds_only(folder, NAMES):
        raise UserError(
            f"{folder}: exists and is not the folder of a training run; choose another --output"
        )
    if not force and any((folder / name).exists() for name in STATES):
        raise UserError(f"{folder} exists already: --resume continues it, --force starts again")


def open_run(folder: Path, settings: dict, resume: bool, force: bool = False) -> None:
    """Make the run's folder, or check that the run found there is the one to go on with.

    Raises UserError for a run with other settings, and as `check_plain_entries` and `check_new_run`.
    """
    path = folder / "settings.json"
    if resume:
        check_plain_entries(folder)
    if resume and path.is_file():
        found = read_json(path)
        for name in sorted(settings.keys() | found.keys()):
            mine, theirs = settings.get(name), found.get(name)
            if mine != theirs:
                raise UserError(
                    f"{folder}: the run to resume had other settings ({name}: {theirs}, now {mine}); "
                    "give it its own or drop --resume"
                )
        return
    check_new_run(folder, force)
    path.unlink(missing_ok=True)  # first, so that half a folder is never taken for a run to go on with
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_text(path, json.dumps(settings, indent=1) + "\n")
