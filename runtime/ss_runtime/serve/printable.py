"""Text of a client that may be shown: nothing in it can steer a terminal or fill a log."""

from __future__ import annotations

LONGEST = 300  # characters of a message


def printable(text: str, longest: int = LONGEST) -> str:
    """`text` on one line, what is not printable escaped as in Python, cut after `longest` characters.

    Escapes control and formatting characters (also those that turn the direction of writing) and halves of
    surrogate pairs, which no encoding takes.
    """
    line = " ".join(text[: 2 * longest].split())
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"
