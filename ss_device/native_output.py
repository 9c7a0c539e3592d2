"""What native code of libraries prints, kept out of what a command writes on stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def native_output_dropped() -> Iterator[None]:
    """What native code prints goes nowhere: tokenizers' Rust says on stdout which entries of
    tokenizer.json it does not know, in the middle of what `--json` writes."""
    sys.stdout.flush()
    stdout, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nowhere)
