"""What every command promises: exit codes, one line per error, help with an example, a version."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ss_device.command_line import CommandParser, line_of_row, print_json, progress, run_command, size_text
from ss_device.errors import LONGEST_LINE, UserError

ROOT = Path(__file__).resolve().parents[2]
OURS = ("ss-convert", "ss-generate", "ss-validate")


def entry_points() -> dict[str, str]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


@pytest.mark.parametrize("name", OURS)
def test_help_has_an_example_and_version_answers(capsys, name):
    module, _, function = entry_points()[name].partition(":")
    main = getattr(importlib.import_module(module), function)
    assert main(["--help"]) == 0
    assert f"example:\n  {name} " in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"{name} ")


def outcome(body) -> int:
    return run_command(CommandParser(prog="ss-test"), body, [])


def raising(error: BaseException):
    def body(arguments):
        raise error

    return body


def test_a_line_has_an_end(capsys):
    """Names and entries of files may be a million characters long."""
    assert outcome(raising(UserError(f"x.toml: no field '{'x' * 1_000_000}'"))) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: x.toml: no field 'xxx") and shown.endswith("x…\n")
    assert len(shown) == len("error: ") + LONGEST_LINE + 1


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("two\nlines"), 2, "error: two lines\n"),
        (FileNotFoundError(2, "No such file or directory", "x.json"), 2, "error: x.json: No such file"),
        (PermissionError(13, "Permission denied", "/build"), 2, "error: /build: Permission denied\n"),
        (OSError(28, "No space left on device"), 2, "error: a file could not be written (No space left"),
        (
            RuntimeError("I/O error (os error 28)"),
            2,
            "error: a file could not be written (No s",
        ),
        (MemoryError(), 2, "error: not enough memory"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_become_one_line(capsys, error, status, line):
    assert outcome(raising(error)) == status
    shown = capsys.readouterr().err
    assert shown.startswith(line) and shown.count("\n") == 1


def test_a_defect_is_one_line_and_debug_shows_where(capsys):
    parser, body = CommandParser(prog="ss-test"), raising(ZeroDivisionError("two\nlines\x1b[2J"))
    assert run_command(parser, body, []) == 70
    shown = capsys.readouterr().err
    assert (
        shown.startswith("error: unexpected ZeroDivisionError: two lines\\x1b[2J (")
        and shown.count("\n") == 1
    )
    assert run_command(parser, body, ["--debug"]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_numbers_that_json_does_not_have_are_null(capsys):
    print_json({"a": float("nan"), "b": [1.5, float("-inf")], "c": {"d": float("inf")}})
    assert capsys.readouterr().out == '{"a": null, "b": [1.5, null], "c": {"d": null}}\n'


def test_status_of_the_body_is_the_exit_code():
    assert outcome(lambda arguments: None) == 0
    assert outcome(lambda arguments: 1) == 1


def test_unknown_option_is_one_line(capsys):
    assert run_command(CommandParser(prog="ss-test"), lambda arguments: None, ["--what"]) == 2
    assert capsys.readouterr().err == "error: unrecognized arguments: --what (see ss-test --help)\n"


def test_closed_pipe_is_no_error():
    program = (
        "from ss_device.command_line import *\n"
        "import sys\n"
        "def body(arguments):\n"
        "    for _ in range(100000): print('text')\n"
        "sys.exit(run_command(CommandParser(prog='ss-test'), body, []))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0


def test_progress_is_silent_without_a_terminal(capsys):
    with progress(2, "working") as advance:
        advance()
        advance("more")
    assert capsys.readouterr() == ("", "")


def test_json_is_one_line_and_not_escaped(capsys):
    print_json({"text": "ä\n"})
    assert capsys.readouterr().out == '{"text": "ä\\n"}\n'
    for moves in "\x7f\x9b\u202e\U000e0001\ud800":  # a terminal's cursor, the direction of a line
        print_json({"text": f"a{moves}b"})
        printed = capsys.readouterr().out
        assert printed.strip().isprintable() and json.loads(printed) == {"text": f"a{moves}b"}


def test_line_of_row_skips_blank_lines(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('\n{"a": 1}\n\n\n{"a": 2}\n')
    assert [line_of_row(file, index) for index in (0, 1)] == [2, 5]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 KB"), (68e6, "68.0 MB"), (2.5e9, "2.50 GB")]
)
def test_size_text(count, text):
    assert size_text(int(count)) == text
