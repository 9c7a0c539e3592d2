"""What may stand in a file's place: nothing, a folder, a link, a pipe, a file that may not be read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random


def _missing(path: Path, root: Path) -> None:
    """The file was taken away already."""


def _folder(path: Path, root: Path) -> None:
    path.mkdir()
    (path / "inside.txt").write_text("inside\n")


def _link_to_canary(path: Path, root: Path) -> None:
    suffix = path.suffix if path.suffix in (".json", ".safetensors") else ".txt"
    path.symlink_to(root / "canary" / f"canary{suffix}")


def _dangling(path: Path, root: Path) -> None:
    path.symlink_to(root / "nowhere")


def _loop(path: Path, root: Path) -> None:
    path.symlink_to(path.name)


def _pipe(path: Path, root: Path) -> None:
    os.mkfifo(path)


def _device(path: Path, root: Path) -> None:
    path.symlink_to("/dev/zero")


def _empty(path: Path, root: Path) -> None:
    path.write_bytes(b"")


PLACES: dict[str, Callable[[Path, Path], None]] = {
    "missing": _missing,
    "folder": _folder,
    "link to a canary": _link_to_canary,
    "dangling link": _dangling,
    "link to itself": _loop,
    "pipe": _pipe,
    "endless device": _device,
    "empty": _empty,
}
UNREADABLE = "unreadable"


def replace_file(path: Path, name: str, root: Path) -> None:
    """Put what `name` says in the place of a file."""
    if name == UNREADABLE:
        path.chmod(0)
        return
    path.unlink()
    PLACES[name](path, root)


def choose_place(rng: Random) -> str:
    return rng.choice([*PLACES, UNREADABLE])
