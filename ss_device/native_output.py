"""Keeps the output of libraries' native code out of a command's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def native_output_dropped() -> Iterator[None]:
    """Discard what native code prints.

    tokenizers' Rust says on stdout which entries of tokenizer.json it does not know, in the middle of what
    `--json` writes, and on stderr where in its code it gave up.
    """
    with ExitStack() as stack:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        stack.callback(os.close, nowhere)
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            if stream is None:  # the command was started with it closed
                continue
            stream.flush()
            earlier = os.dup(number)
            stack.callback(os.close, earlier)
            os.dup2(nowhere, number)
            stack.callback(os.dup2, earlier, number)
        yield
