"""Text of a client that may be shown: nothing in it can steer a terminal or fill a log."""

from __future__ import annotations

from ss_device import errors

LONGEST = 300  # characters of a message


def printable(text: str, longest: int = LONGEST) -> str:
    """`text` on one line, escaped where it is not printable, cut after `longest` characters."""
    shown = errors.printable(" ".join(text[: 2 * longest].split()))
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"
