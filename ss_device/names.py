"""Names and paths read from files, checked once where they enter, before they become part of a path."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from ss_device.errors import UserError

NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
LONGEST_NAME = 100


def check_name(name: object, what: str) -> str:
    """`name` where it can be a file's name; UserError, beginning with `what`, otherwise."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise UserError(
            f"{what} {name!r:.120} is no name (letters, digits, '_', '.' and '-', the first a letter or "
            f"digit, at most {LONGEST_NAME})"
        )
    return name


def check_base_name(name: object, what: str) -> str:
    """A base model's name: as `check_name`, or an id on the hub (`organisation/model`)."""
    if isinstance(name, str) and name.count("/") == 1:
        for part in name.split("/"):
            check_name(part, what)
        return name
    return check_name(name, what)


def inside(folder: Path, name: object, where: str) -> Path:
    """The path of file `name` of `folder`, which stays in it.

    Raises UserError, beginning with `where`, for an absolute path, one with `..` or unprintable
    characters, and one that a symbolic link leads out of the folder.
    """
    if not isinstance(name, str) or not name or not name.isprintable() or "\\" in name:
        raise UserError(f"{where}: {name!r:.120} is no path of a file")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise UserError(f"{where}: path '{name:.120}' leads out of the folder")
    found = folder / path
    if not Path(os.path.realpath(found)).is_relative_to(os.path.realpath(folder)):
        raise UserError(f"{where}: path '{name:.120}' leads out of the folder by a symbolic link")
    return found
