"""One-line error when the disk is full: every library reports a refused write in its own way."""

from __future__ import annotations

import errno
import os
import re

# No space, a file larger than allowed, a quota, a damaged disk, one that is only read.
REFUSALS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO, errno.EROFS)
# safetensors ("os error 28") and shutil.Error ("[Errno 28]") give the number only in their text.
NUMBERED = re.compile(r"(?:os error |\[Errno )(\d+)")
# Writers that do not always say why a write failed. Of packages on a full disk coremltools reports an
# input/output error, or misses the manifest that it could not write.
UNEXPLAINED = {
    "[MIL FileWriter]": "coremltools",
    "cannot copy: Input/output error": "coremltools",
    "A valid manifest does not exist at path": "coremltools",
    "[write] Unable to write": "MLX",
    "[export_function] Failed to open": "MLX",
}
UNEXPLAINED_REASON = "was refused a write: no space, a limit, a quota or a damaged disk"


def refused(error: BaseException | None) -> str | None:
    """The system's reason if an error, or what caused it, is a refused write; else None.

    C++ writers give the system's message in their text ("filesystem error: …: No space left on device").
    """
    while error is not None:
        text = str(error)
        numbers = [getattr(error, "errno", None), *map(int, NUMBERED.findall(text))]
        for part, library in UNEXPLAINED.items():
            if part in text:
                return f"{library} {UNEXPLAINED_REASON}"
        for number in REFUSALS:
            if number in numbers or os.strerror(number) in text:
                return os.strerror(number)
        error = error.__cause__ or error.__context__
    return None
