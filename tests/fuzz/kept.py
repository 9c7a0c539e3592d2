"""Cases that have run, and folders that hold one with its damaged file: it can be run again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.cases import Case, file_of
from tests.fuzz.child import Ended
from tests.fuzz.outcome import Outcome
from tests.fuzz.place_mutations import replace_file
from tests.fuzz.sandbox import Sandbox
from tests.fuzz.sealing import seal

CASE_FILE = "case.json"


@dataclass(frozen=True)
class Finished:
    """A case that has run. what: how the file was damaged."""

    case: Case
    what: str
    ended: Ended
    outcome: Outcome

    def to_dict(self) -> dict:
        return {
            "id": self.case.id,
            "kind": self.case.kind,
            "file": self.case.path,
            "damage": self.what,
            "place": self.case.place,
            "sealed": self.case.sealed,
            "command": self.case.command.line(),
            "command_name": self.case.command_name,
            "outcome": self.outcome.name,
            "detail": self.outcome.detail,
            "said": self.outcome.said,
            "seconds": round(self.ended.seconds, 3),
        }


def keep_case(finished: Finished, sandbox: Sandbox, folder: Path) -> None:
    """Write a folder of the case: the damaged file, what was done, what the command said."""
    place = folder / finished.case.id.replace(":", "-")
    place.mkdir(parents=True, exist_ok=True)
    (place / CASE_FILE).write_text(json.dumps(finished.to_dict(), indent=1) + "\n")
    (place / "stderr.txt").write_bytes(finished.ended.stderr[-20_000:])
    damaged = file_of(finished.case, sandbox)
    if damaged.is_file() and not damaged.is_symlink() and not finished.case.place:
        shutil.copy(damaged, place / f"damaged.{damaged.name}")


def kept_case(folder: Path) -> tuple[Case, Callable[[Case, Sandbox], str]]:
    """The case of such a folder, and how its file is damaged, whatever seeds and tables mean by now."""
    about = json.loads((folder / CASE_FILE).read_text())
    seed, _, index = about["id"].partition(":")
    case = Case(
        int(seed), int(index), about["kind"], about["command_name"], about["file"], about["place"],
        about["sealed"],
    )  # fmt: skip

    def harm(case: Case, sandbox: Sandbox) -> str:
        path = file_of(case, sandbox)
        if case.place:
            replace_file(path, case.place, sandbox.root)
        else:
            path.unlink()
            shutil.copy(folder / f"damaged.{path.name}", path)
        if case.sealed:
            seal(sandbox.work, case.path)
        return about["damage"]

    return case, harm
