"""What all commands share: one line per error, exit codes, progress, tables. Standard library and rich."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ss_device.disk import refused
from ss_device.errors import UserError, is_panic, one_line
from ss_device.json_lines import read_json_lines, read_lines
from ss_device.json_numbers import with_nulls

DEVICES = ("cpu", "cuda", "mps")  # of PyTorch
BAD_INPUT, DEFECT, INTERRUPTED = 2, 70, 130  # 70: EX_SOFTWARE of sysexits.h
LOG_WIDTH = 120


class CommandParser(argparse.ArgumentParser):
    """argparse with our habits: an example under the options, `--version`, `--debug`, one-line errors."""

    def __init__(self, *, example: str = "", **settings) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        settings.setdefault("allow_abbrev", False)
        if example:
            settings["epilog"] = f"example:\n  {example}"
        super().__init__(**settings)
        self.add_argument("--version", action="version", version=f"%(prog)s {program_version()}")
        # Read by `run_command` from the words themselves, so that it works before they are parsed.
        self.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show where an error arose"
        )

    def error(self, message: str) -> None:
        raise UserError(f"{message} (see {self.prog} --help)")


def add_device(parser: argparse._ActionsContainer, what: str = "") -> None:
    """The option `--device`, for what PyTorch computes. what: which part of the command that is."""
    parser.add_argument("--device", choices=DEVICES, help=device_help(what))


def device_help(what: str = "") -> str:
    """What `--device` says of itself. what: as in `add_device`."""
    where = f"{what}: where" if what else "where"
    return f"{where} PyTorch computes (default: $SS_DEVICE, else a GPU if there is one)"


def program_version() -> str:
    """Version of the installed package."""
    try:
        return version("ss-device")
    except PackageNotFoundError:
        return "unknown"


def run_command(
    parser: CommandParser,
    body: Callable[[argparse.Namespace], int | None],
    argv: list[str] | None = None,
) -> int:
    """Parse `argv`, run `body`, return the exit code.

    Bad input (UserError, a file the system refuses, a full disk, too little memory) is one line on stderr
    and 2; Ctrl-C is 130; a reader that closed the pipe is not an error. Anything else is a defect: one
    line and 70. `--debug` shows the traceback of each.
    """
    quiet_libraries()
    words = sys.argv[1:] if argv is None else argv
    try:
        status = body(parser.parse_args(words)) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        _forget_stdout()
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as exit_request:  # --help and --version of argparse
        return int(exit_request.code or 0)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if "--debug" in map(str, words):
            traceback.print_exc()
        status, message = _explained(error)
        print(f"error: {message}", file=sys.stderr)
        return status


def _explained(error: BaseException) -> tuple[int, str]:
    """Exit code and line of an error that ended a command."""
    if isinstance(error, UserError):
        return BAD_INPUT, one_line(error)
    filename = getattr(error, "filename", None)
    if isinstance(error, OSError) and filename and error.strerror:
        return BAD_INPUT, one_line(UserError(f"{filename}: {error.strerror}"))
    if reason := refused(error):
        return BAD_INPUT, f"a file could not be written ({reason}); what was there before is untouched"
    if isinstance(error, MemoryError):
        return BAD_INPUT, f"not enough memory ({one_line(error)})"
    return DEFECT, (
        f"unexpected {type(error).__name__}: {one_line(error):.300} (a defect, here or in a library: "
        "--debug shows it)"
    )


def _forget_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def quiet_libraries(warnings_too: bool = True) -> None:
    """Keep notices of the libraries below us (versions, missing accelerators) off a user's screen.

    warnings_too: Python's own warnings as well, which belong to the program: a command's, not a caller's.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # What Metal does not have is computed on the CPU. PyTorch reads it when it is imported.
    os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    for name in ("coremltools", "transformers", "torch", "huggingface_hub", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if warnings_too and not sys.warnoptions:
        warnings.filterwarnings("ignore")


def console(stderr: bool = False) -> Console:
    """A rich console; in a log (no terminal) lines may be wider than the 80 columns rich assumes."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else LOG_WIDTH
    return Console(file=stream, width=width, highlight=False)


@contextmanager
def progress(total: int, description: str) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr (terminals only). Yields `advance(next description)`, one call a unit."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    screen = console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(description, total=total)

        def advance(following: str = "") -> None:
            bar.update(task, advance=1, description=following or description)

        yield advance


def print_json(value: dict) -> None:
    """One JSON object on one line of stdout, flushed so that a reader sees it at once."""
    print(json_text(value), flush=True)


def json_text(value: object, **settings) -> str:
    """Strict JSON: a number that is not finite becomes null. settings: of `json.dumps`.

    Letters of all languages stand as they are, what a terminal would obey as an escape.
    """
    text = json.dumps(with_nulls(value), ensure_ascii=False, allow_nan=False, **settings)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def prompts_from_file(
    path: Path, prompt_of: Callable[[dict], str], limit: int | None = None
) -> list[tuple[dict, str]]:
    """(row, prompt) of the first `limit` rows of a JSON lines file; errors name file and line."""
    prompts: list[tuple[dict, str]] = []
    for row in islice(read_json_lines(path), limit):
        with row_errors(path, len(prompts)):
            prompt = prompt_of(row)
            if not isinstance(prompt, str):
                raise UserError(f"the prompt is {type(prompt).__name__}, expected text")
        prompts.append((row, prompt))
    if not prompts:
        raise UserError(f"{path}: no rows")
    return prompts


@contextmanager
def row_errors(path: Path | None, index: int) -> Iterator[None]:
    """Errors about the `index`-th row of a file name file and line. path None: no file."""
    try:
        yield
    except UserError as error:
        if path is None:
            raise
        raise UserError(f"{path}:{line_of_row(path, index)}: {error}") from error


def line_of_row(path: Path, index: int) -> int:
    """Line number (from 1) of the `index`-th row; blank lines are no rows."""
    return next(islice((number for number, _ in read_lines(path)), index, None))


def positive(text: str) -> int:
    """argparse type: an integer of at least 1."""
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def positive_number(text: str) -> float:
    """argparse type: a number above 0."""
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from error
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def size_text(count: int) -> str:
    """Bytes for people: `123 B`, `4.5 KB`, `67.8 MB`."""
    value = float(count)
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"
