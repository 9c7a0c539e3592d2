"""What an undisturbed run of a command leaves, and what may differ from run to run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.faults.commands import Command
from tests.faults.processes import Finished, run
from tests.faults.snapshots import Contents, Volatile, contents, differences, same


@dataclass
class Place:
    """Where checks work: inputs (never changed) and folders of their own for each purpose."""

    work: Path
    inputs: Path

    def folder(self, name: str) -> Path:
        return self.work / name


@dataclass
class Reference:
    """earlier: everything there before; after: everything after the run, and after the finished command ran
    again where that renews it; volatile: what may differ."""

    command: Command
    earlier: Contents
    after: list[Contents]
    volatile: Volatile

    def result(self, everything: Contents) -> Contents:
        """The part that is the command's result."""
        name = self.command.result
        return {n: c for n, c in everything.items() if n == name or n.startswith(name + "/")}

    def standing(self, folder: Path) -> str:
        """What stands under the result's name: nothing, earlier, new, part (of one that grows), neither."""
        found, name = contents(folder, self.command.result), self.command.result
        if not found:
            return "nothing"
        if self._same(found, self.result(self.earlier)):
            return "earlier"
        wanted = self.result(self.after[0])
        if not self.command.reproducible:
            return "new" if found.keys() == wanted.keys() else "neither"
        if any(self._same(found, self.result(after)) for after in self.after):
            return "new"
        if self.command.grows and wanted[name].startswith(found[name]):
            return "part"
        return "neither"

    def _same(self, found: Contents, wanted: Contents) -> bool:
        return found.keys() == wanted.keys() and all(
            same(wanted[n], found[n], n, self.volatile) for n in wanted
        )

    def after_rerun(self, folder: Path) -> list[str]:
        """How the folder differs from the undisturbed one."""
        found = contents(folder)
        if self.command.reproducible:
            return min((differences(after, found, self.volatile) for after in self.after), key=len)
        return differences(dict.fromkeys(self.after[0], b""), dict.fromkeys(found, b""), Volatile())


def reference_of(command: Command, place: Place) -> Reference:
    """Run the command twice undisturbed, and once more on what it has made where it renews that."""
    folder = place.folder("reference")
    runs = []
    for _ in range(2):
        command.prepare(place.inputs, folder)
        earlier = contents(folder)
        _must_succeed(command, run(command.body(place.inputs), folder))
        runs.append(contents(folder))
    volatile = Volatile()
    if command.reproducible:
        volatile.learn(*runs)
    after = runs[:1]
    if command.renews:
        _must_succeed(command, run(command.body(place.inputs, rerun=True), folder))
        after.append(contents(folder))
    return Reference(command, earlier, after, volatile)


def _must_succeed(command: Command, finished: Finished) -> None:
    if finished.status:
        raise RuntimeError(f"{command.name} fails undisturbed: {finished.err}")
