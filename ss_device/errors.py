"""Errors a user can act on: one clear line that names the thing and what was expected."""


class UserError(Exception):
    """Bad input. Commands print it as one line and exit with code 2."""


def one_line(error: BaseException) -> str:
    """The message of `error` on a single line (other libraries' messages may span many)."""
    text = " ".join(str(error).split())
    return text or type(error).__name__
