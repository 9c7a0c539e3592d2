"""Write the option lists of docs/commands.md from the commands' own parsers.

    python -m scripts.command_options            # rewrite the lists
    python -m scripts.command_options --check    # exit code 1 if a list is not what the parsers say

A list stands between `<!-- options: COMMAND -->` and `<!-- end of options -->`. Everything else on the page
is written by hand, the options of ss-stream (Swift) included.
"""

from __future__ import annotations

import argparse
import importlib
import re
import runpy
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

from ss_device.errors import UserError

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/commands.md"
BLOCK = re.compile(r"<!-- options: (?P<command>.+?) -->\n.*?<!-- end of options -->", re.DOTALL)
EXECUTOR = "ss_executor"
DISPATCHED = {"ss-convert": ("audit", "sizes")}  # handed on before a parser sees them
COMMON = ("help", "version", "debug")  # described once for all commands


class _Parser(BaseException):
    """Carries a parser out of a command that was about to use it."""


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """Every command and subcommand with its parser, by the name that the page gives it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = {}
    for name, target in project["scripts"].items():
        module, function = target.split(":")
        main = getattr(importlib.import_module(module), function)
        parser = _caught(lambda main=main: main([]))
        found |= dict(_with_subcommands(name, parser))
        for word in DISPATCHED.get(name, ()):
            found[f"{name} {word}"] = _caught(lambda main=main, word=word: main([word]))
    run = _caught(lambda: runpy.run_module(EXECUTOR, run_name="__main__"))
    return found | {f"python -m {EXECUTOR}": run}


def _caught(start: Callable[[], object]) -> argparse.ArgumentParser:
    """The parser that `start` calls `parse_args` of."""

    def stop(parser: argparse.ArgumentParser, *_args: object, **_settings: object) -> None:
        raise _Parser(parser)

    with patch.object(argparse.ArgumentParser, "parse_args", stop), patch.object(sys, "argv", ["command"]):
        try:
            start()
        except _Parser as caught:
            return caught.args[0]
    raise UserError("a command ended before it read its options")


def _with_subcommands(
    name: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    nested = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not nested:
        yield name, parser
    for action in nested:
        for word, inner in action.choices.items():
            yield from _with_subcommands(f"{name} {word}", inner)


def option_list(parser: argparse.ArgumentParser) -> str:
    """Markdown: a list per group of options, one line each."""
    lines = []
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.dest not in COMMON]
        if not actions:
            continue
        if group.title not in ("positional arguments", "options"):
            lines += ["", f"{_text(group.title)}:".capitalize(), ""]
        lines += [_line(parser, action) for action in actions]
    return "\n".join(lines).strip("\n")


def _line(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    formatter = parser._get_formatter()
    value = "" if action.nargs == 0 else formatter._format_args(action, _placeholder(action))
    names = ", ".join(f"`{f'{name} {value}'.strip()}`" for name in action.option_strings) or f"`{value}`"
    said = _text(formatter._expand_help(action)) if action.help else ""
    if action.default not in (None, argparse.SUPPRESS, [], "", False, True) and "default" not in said:
        said = f"{said} (default: {action.default})".strip()
    required = " (required)" if action.required and action.option_strings else ""
    return f"* {names}" + (f": {said}" if said else "") + required


def _placeholder(action: argparse.Action) -> str:
    """What stands for the value: the choices, N for a whole number, X for another one, else a word."""
    if action.choices and action.metavar is None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    if not action.option_strings:
        return action.dest
    kind = getattr(action.type, "__name__", "")
    return {"int": "N", "positive": "N", "float": "X", "positive_number": "X"}.get(
        kind, action.dest.upper().split("_")[-1]
    )


def _text(text: str) -> str:
    """Help as Markdown: options as code, no tags."""
    marked = re.sub(r"(?<![\w`/-])--[a-z][a-z0-9-]*", r"`\g<0>`", text)
    return marked.replace("<", r"\<").replace("*", r"\*")


def with_lists(page: str, parsers: dict[str, argparse.ArgumentParser]) -> str:
    """The page with every list replaced; UserError for a command that the page or the code lacks."""
    on_page = [match["command"] for match in BLOCK.finditer(page)]
    if missing := sorted(set(parsers) ^ set(on_page)):
        raise UserError(f"{PAGE.name} and the parsers disagree about the commands {', '.join(missing)}")

    def block(match: re.Match) -> str:
        command = match["command"]
        return f"<!-- options: {command} -->\n{option_list(parsers[command])}\n<!-- end of options -->"

    return BLOCK.sub(block, page)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.command_options", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if the page differs"
    )
    options = parser.parse_args(argv)
    page = PAGE.read_text(encoding="utf-8")
    try:
        written = with_lists(page, command_parsers())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.check:
        return int(written != page)
    PAGE.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
