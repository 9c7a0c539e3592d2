"""Text of a client made safe to print: no control characters, and a bounded length."""

from __future__ import annotations

from ss_device import errors

LONGEST = 300  # characters of a message


def printable(text: str, longest: int = LONGEST) -> str:
    """`text` on one line, escaped where it is not printable, cut after `longest` characters."""
    shown = errors.printable(" ".join(text[: 2 * longest].split()))
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"
