"""A disk that takes no more, in one line: every library that writes reports it in its own way."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ss_device.errors import UserError

# No space, a file larger than allowed, a quota.
REFUSALS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


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

    safetensors and C++ writers give the number only in their text.
    """
    while error is not None:
        numbers = [getattr(error, "errno", None), *map(int, re.findall(r"os error (\d+)", str(error)))]
        if found := [number for number in numbers if number in REFUSALS]:
            return os.strerror(found[0])
        error = error.__cause__ or error.__context__
    return None
