"""Binary files that are either written completely or raise an error.

`ndarray.tofile` writes through a C stream of its own whose last flush nobody checks: on a full disk, or
beyond a limit on file sizes, it returns as if all had been written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def checked_file(path: Path | str) -> Iterator[BinaryIO]:
    """A new file, open for writing; its `write` takes bytes and contiguous arrays.

    When the block ends the system has taken every byte, down to the disk. OSError names the file otherwise;
    what stands there is then to be thrown away.
    """
    try:
        with open(path, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
