"""Errors of the executor: every message is one line that names what is wrong and where."""


class ExecutorError(Exception):
    """A program cannot be prepared or run: bad input, bad state, an operation that failed."""


class UnknownOpError(ExecutorError):
    """A function holds operations that the executor does not implement."""

    def __init__(self, op_type: str, output: str, function: str, others: tuple[str, ...] = ()):
        self.op_type, self.output, self.function = op_type, output, function
        more = f" (also not implemented: {', '.join(others)})" if others else ""
        super().__init__(
            f"operation '{op_type}' (output '{output}') of function '{function}' "
            f"is not implemented by the executor{more}"
        )


class PackageError(ExecutorError):
    """A package is missing, damaged or not an ML program."""
