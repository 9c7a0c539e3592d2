"""Stages of a long job that a later run can resume: a record of what is finished, beside the work."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

RECORD = "stages.json"


class Stages:
    """Runs stages, remembers finished ones in the partial folder, forgets them for other inputs.

    What lies in the folder and is of no finished stage goes when a run begins: an interrupted stage leaves
    files half written, also under names that libraries choose.
    """

    def __init__(self, folder: Path, inputs: str, report: Callable[[str], None]) -> None:
        self._file = folder / RECORD
        self._folder = folder
        self._report = report
        self.seconds: dict[str, float] = {}
        self.reused: list[str] = []
        self.notes: list[str] = []
        self._record = self._read()
        if self._record.get("inputs") != inputs:
            self._record = {"inputs": inputs, "done": {}, "files": []}
        self._remove_others(folder, {*self._record["files"], RECORD})
        self._write()

    def run(self, name: str, work: Callable[[], dict]) -> dict:
        """The stage's result (JSON), from an earlier run or from `work`."""
        done = self._record["done"]
        if name in done:
            self.reused.append(name)
            return done[name]
        self._report(name)
        started = time.perf_counter()
        result = work()
        self.seconds[name] = round(time.perf_counter() - started, 2)
        done[name] = result
        self._record["files"] = [
            path.relative_to(self._folder).as_posix()
            for path in self._folder.rglob("*")
            if not path.is_dir()
        ]
        self._write()
        return result

    def forget(self) -> None:
        """Drop the record: from here on only the manifest is missing."""
        self._file.unlink(missing_ok=True)

    def _read(self) -> dict:
        try:
            found = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) and "files" in found else {}

    def _remove_others(self, folder: Path, known: set[str]) -> None:
        """Delete what is not `known` in a folder, and folders that held nothing else."""
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                self._remove_others(entry, known)
                if not any(entry.iterdir()):
                    entry.rmdir()
            elif entry.relative_to(self._folder).as_posix() not in known:
                entry.unlink()

    def _write(self) -> None:
        temporary = self._file.with_suffix(".new")
        temporary.write_text(json.dumps(self._record))
        os.replace(temporary, self._file)
