"""Errors a user can act on: one clear line that names the thing and what was expected."""

from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_LINE = 2000
"""Characters of a message: names and entries of files may be as long as files are."""


class UserError(Exception):
    """Bad input. Commands print it as one line and exit with code 2."""


class NotFinite(UserError, FloatingPointError):
    """A loss or logits are NaN or infinite."""


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Around a library's reader of files: whatever it raises becomes a UserError that begins with `what`.

    Such readers raise what their depths do: KeyError, TypeError, errors of their own kinds.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise UserError(f"{what} ({one_line(error):.300})") from error


def is_panic(error: BaseException) -> bool:
    """Whether a library's Rust code panicked: the class is not derived from Exception."""
    return type(error).__name__ == "PanicException"


def one_line(error: BaseException) -> str:
    """The message of `error` on a single line (other libraries' messages may span many), printable, cut
    where it is very long."""
    text = printable(" ".join(str(error).split()))
    return text[: LONGEST_LINE - 1] + "…" if len(text) > LONGEST_LINE else text or type(error).__name__


def printable(text: str) -> str:
    """`text` with control sequences and lone surrogates as escapes (`\\x1b`), line ends among them.

    Names in files may hold what moves a terminal's cursor or renames its window.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
