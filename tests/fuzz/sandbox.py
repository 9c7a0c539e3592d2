"""A copy of the inputs in which cases run: what a command changed is seen, and put right afterwards."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from tests.fuzz.inputs import WORK

TEMPORARY = "tmp"  # where commands may leave temporary files and caches
Entry = tuple[int, ...]


class Sandbox:
    """Paths are relative to `root`, as `work/bundle/manifest.json`."""

    def __init__(self, inputs: Path, root: Path) -> None:
        self.inputs, self.root = inputs, root
        shutil.copytree(inputs, root, dirs_exist_ok=True)
        (root / TEMPORARY).mkdir()
        self._sound = self.snapshot()
        self._canaries = [root / name for name in self._sound if "/canary." in f"/{name}"]

    @property
    def work(self) -> Path:
        return self.root / WORK

    def snapshot(self) -> dict[str, Entry]:
        """Every file, link and folder with what tells it from a changed one."""
        found: dict[str, Entry] = {}
        self._scan(self.root, "", found)
        return found

    def _scan(self, folder: Path, prefix: str, found: dict[str, Entry]) -> None:
        try:
            entries = list(os.scandir(folder))
        except OSError:
            return
        for entry in entries:
            name, about = prefix + entry.name, entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(about.st_mode):
                found[name] = (about.st_mode,)
                if name != TEMPORARY:
                    self._scan(folder / entry.name, name + "/", found)
            else:
                found[name] = (about.st_mode, about.st_size, about.st_mtime_ns, about.st_ino)

    def watch_canaries(self) -> None:
        """Set their time of access back. The system notes a read when that lies before the last change."""
        for path in self._canaries:
            os.utime(path, ns=(0, path.stat().st_mtime_ns))

    def read_canaries(self) -> list[str]:
        """Canaries that were read since, by native code as well."""
        return [
            str(p.relative_to(self.root)) for p in self._canaries if p.is_file() and p.stat().st_atime_ns
        ]

    def restore(self) -> None:
        """Make everything as it was."""
        now = self.snapshot()
        for name in sorted(now.keys() - self._sound.keys()):
            self._remove(self.root / name)
        for name in sorted(self._sound):
            if now.get(name) != self._sound[name]:
                self._copy_back(name)
        shutil.rmtree(self.root / TEMPORARY)
        (self.root / TEMPORARY).mkdir()

    def _copy_back(self, name: str) -> None:
        path, source = self.root / name, self.inputs / name
        if source.is_dir():
            if path.is_symlink() or not path.is_dir():
                self._remove(path)
                path.mkdir()
            path.chmod(source.stat().st_mode)
            return
        self._remove(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, path)
        about = path.stat()
        self._sound[name] = (about.st_mode, about.st_size, about.st_mtime_ns, about.st_ino)

    def _remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def changes(before: dict[str, Entry], after: dict[str, Entry]) -> list[str]:
    """Paths that are new, gone or changed, the folder for temporary files left out."""
    names = sorted(before.keys() | after.keys())
    return [n for n in names if before.get(n) != after.get(n) and n.partition("/")[0] != TEMPORARY]
