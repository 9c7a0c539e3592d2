"""A disk that takes no more, in one line: every library that writes reports it in its own way."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ss_device.errors import UserError

# No space, a file larger than allowed, a quota.
REFUSALS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
# safetensors ("os error 28") and shutil.Error ("[Errno 28]") give the number only in their text.
NUMBERED = re.compile(r"(?:os error |\[Errno )(\d+)")
# coremltools' writers of weights and of packages do not always say why a write failed; on a full disk the
# second one reports an input/output error.
UNEXPLAINED = ("[MIL FileWriter]", "cannot copy: Input/output error")
UNEXPLAINED_REASON = "coremltools was refused a write: no space, a limit, a quota or a damaged disk"


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


def refused(error: BaseException) -> str | None:
    """The system's reason if an error, or what caused it, is a refused write; else None.

    C++ writers give the system's message in their text ("filesystem error: …: No space left on device").
    """
    while error is not None:
        text = str(error)
        numbers = [getattr(error, "errno", None), *map(int, NUMBERED.findall(text))]
        for number in REFUSALS:
            if number in numbers or os.strerror(number) in text:
                return os.strerror(number)
        if any(part in text for part in UNEXPLAINED):
            return UNEXPLAINED_REASON
        error = error.__cause__ or error.__context__
    return None


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
