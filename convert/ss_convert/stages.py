"""Stages of a long job that a later run can resume: a record of what is finished, beside the work."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

RECORD = "stages.json"


class Stages:
    """Runs stages, remembers finished ones in the partial folder, forgets them for other inputs."""

    def __init__(self, folder: Path, inputs: str, report: Callable[[str], None]) -> None:
        self._file = folder / RECORD
        self._folder = folder
        self._report = report
        self.seconds: dict[str, float] = {}
        self.reused: list[str] = []
        self.notes: list[str] = []
        self._record = self._read()
        if self._record.get("inputs") != inputs:
            for entry in folder.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            self._record = {"inputs": inputs, "done": {}}
            self._write()

    def run(self, name: str, work: Callable[[], dict], subfolder: str | None = None) -> dict:
        """The stage's result (JSON), from an earlier run or from `work`, which fills `subfolder`."""
        done = self._record["done"]
        if name in done:
            self.reused.append(name)
            return done[name]
        self._report(name)
        if subfolder:
            shutil.rmtree(self._folder / subfolder, ignore_errors=True)
        started = time.perf_counter()
        result = work()
        self.seconds[name] = round(time.perf_counter() - started, 2)
        done[name] = result
        self._write()
        return result

    def forget(self) -> None:
        """Drop the record: from here on only the manifest is missing."""
        self._file.unlink(missing_ok=True)

    def _read(self) -> dict:
        try:
            return json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}

    def _write(self) -> None:
        temporary = self._file.with_suffix(".new")
        temporary.write_text(json.dumps(self._record))
        os.replace(temporary, self._file)
