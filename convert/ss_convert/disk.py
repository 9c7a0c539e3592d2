"""A conversion on a full disk: one line, and no temporary file left behind."""

from __future__ import annotations

import shutil
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ss_device.disk import refused
from ss_device.errors import UserError


@contextmanager
def one_line_when_full(target: Path) -> Iterator[None]:
    """Turn a refused write inside the block into a UserError; other errors pass."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if (reason := refused(error)) is None:
            raise
        raise UserError(f"{target}: could not be written ({reason}); nothing there was changed") from error


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Have libraries put their temporary files under `folder` instead of the system's place for them.

    What a killed process leaves there goes with the folder, and a full disk is the folder's.
    """
    place, earlier = folder / "temporary", tempfile.tempdir
    place.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(place)
    try:
        yield
    except Exception as error:
        _close_temporary_files(error)
        raise
    finally:
        tempfile.tempdir = earlier
        shutil.rmtree(place, ignore_errors=True)


def _close_temporary_files(error: BaseException) -> None:
    """Close what a failed write left open: such a file removes itself, later than its folder otherwise."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if isinstance(value, tempfile._TemporaryFileWrapper):
                with suppress(OSError):
                    value.close()
