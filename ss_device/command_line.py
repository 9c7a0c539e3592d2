"""What all commands share: one line per error, exit codes, progress, tables. Standard library and rich."""

from __future__ import annotations

import argparse
import errno
import gzip
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ss_device.errors import UserError, one_line
from ss_device.json_lines import read_json_lines

BAD_INPUT, INTERRUPTED = 2, 130
LOG_WIDTH = 120


class CommandParser(argparse.ArgumentParser):
    """argparse with our habits: an example under the options, `--version`, errors of one line."""

    def __init__(self, *, example: str = "", **settings) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        settings.setdefault("allow_abbrev", False)
        if example:
            settings["epilog"] = f"example:\n  {example}"
        super().__init__(**settings)
        self.add_argument("--version", action="version", version=f"%(prog)s {program_version()}")

    def error(self, message: str) -> None:
        raise UserError(f"{message} (see {self.prog} --help)")


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

    Bad input (UserError, a file the system refuses) is one line on stderr and 2; Ctrl-C is 130; a
    reader that closed the pipe is not an error. Anything else is a defect and keeps its traceback.
    """
    quiet_libraries()
    try:
        status = body(parser.parse_args(argv)) or 0
        sys.stdout.flush()
        return status
    except UserError as error:
        return _bad_input(error)
    except BrokenPipeError:
        _forget_stdout()
        return 0
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        where = f"{error.filename}: " if error.filename else ""
        return _bad_input(UserError(f"{where}{error.strerror}"))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as exit_request:  # --help and --version of argparse
        return int(exit_request.code or 0)


def _bad_input(error: UserError) -> int:
    print(f"error: {one_line(error)}", file=sys.stderr)
    return BAD_INPUT


def _forget_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def quiet_libraries() -> None:
    """Keep notices of the libraries below us (versions, missing accelerators) off a user's screen."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("coremltools", "transformers", "torch", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.warnoptions:
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
    print(json.dumps(value, ensure_ascii=False), flush=True)


def prompts_from_file(
    path: Path, prompt_of: Callable[[dict], str], limit: int | None = None
) -> list[tuple[dict, str]]:
    """(row, prompt) of the first `limit` rows of a JSON lines file; errors name file and line."""
    prompts: list[tuple[dict, str]] = []
    for row in islice(read_json_lines(path), limit):
        try:
            prompt = prompt_of(row)
            if not isinstance(prompt, str):
                raise UserError(f"the prompt is {type(prompt).__name__}, expected text")
        except UserError as error:
            raise UserError(f"{path}:{line_of_row(path, len(prompts))}: {error}") from error
        prompts.append((row, prompt))
    if not prompts:
        raise UserError(f"{path}: no rows")
    return prompts


def line_of_row(path: Path, index: int) -> int:
    """Line number (from 1) of the `index`-th row; blank lines are no rows."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        filled = (number for number, line in enumerate(lines, 1) if line.strip())
        return next(islice(filled, index, None))


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
