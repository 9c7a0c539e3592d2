"""docs/commands.md names every option of every command, and none that no command has."""

from __future__ import annotations

import argparse
import importlib
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/commands.md"
COMMANDS = (
    "ss-train base", "ss-train distill", "ss-train adapter", "ss-train bigram-bias", "ss-train lora",
    "ss-train score", "ss-train evaluate", "ss-train replay", "ss-convert", "ss-convert audit",
    "ss-convert sizes", "ss-generate", "ss-serve", "ss-bench run", "ss-bench tune", "ss-bench compare",
    "ss-bench plot", "ss-validate", "python -m ss_executor",
)  # fmt: skip
EVERYWHERE = {"--help", "--version", "--debug"}


class Stop(BaseException):
    """Ends a command when it is about to parse its words."""


@pytest.fixture
def caught(monkeypatch):
    """Start something; the first parser that it parses words with."""

    def parse(parser, *_args, **_settings):
        raise Stop(parser)

    def start(body) -> argparse.ArgumentParser:
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
        monkeypatch.setattr(sys, "argv", ["command"])
        with pytest.raises(Stop) as stopped:
            body()
        return stopped.value.args[0]

    return start


def entry_point(name: str):
    target = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"][name]
    module, function = target.split(":")
    return getattr(importlib.import_module(module), function)


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    nested = [a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(nested[0]) if nested else {}


def parser_of(command: str, caught) -> argparse.ArgumentParser:
    if command.startswith("python -m "):
        return caught(lambda: runpy.run_module(command.removeprefix("python -m "), run_name="__main__"))
    name, *words = command.split()
    main = entry_point(name)
    parser = caught(lambda: main(words))
    for word in words:
        parser = subcommands(parser).get(word, parser)
    assert not subcommands(parser), f"{command}: no command of that name"
    return parser


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Options as they are written, `--x/--no-x` as two; those of all commands left out."""
    return {
        name for action in parser._actions for name in action.option_strings if name[:2] == "--"
    } - EVERYWHERE


def positionals_of(parser: argparse.ArgumentParser) -> list[str]:
    return [str(a.metavar or a.dest) for a in parser._actions if not a.option_strings]


def sections(text: str) -> dict[str, str]:
    """Every heading with what stands below it, up to the next heading of any level."""
    without_code = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    parts = re.split(r"^#+ (.+)$", without_code, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def listed(section: str) -> list[str]:
    """The list items that describe an option or an argument: their code, without what is said of it."""
    return re.findall(r"^\* ((?:`[^`]+`(?:, )?)+)(?:: .*)?$", section, flags=re.MULTILINE)


def listed_options(section: str) -> set[str]:
    return {name for item in listed(section) for name in re.findall(r"`(--[a-z][a-z0-9-]*)", item)}


@pytest.mark.parametrize("command", COMMANDS)
def test_section_lists_the_options_of_the_parser(command, caught):
    section = sections(PAGE.read_text())[command]
    parser = parser_of(command, caught)
    assert listed_options(section) == options_of(parser)
    arguments = [item.strip("`") for item in listed(section) if not item.startswith("`--")]
    assert [a.split()[0] for a in arguments] == positionals_of(parser)


def test_every_command_has_a_section(caught):
    found = {"python -m ss_executor"}
    for name in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]:
        main = entry_point(name)
        words = subcommands(caught(lambda main=main: main([])))
        found |= {f"{name} {word}" for word in words} or {name}
    assert found <= set(COMMANDS)
    assert set(COMMANDS) - found == {"ss-convert audit", "ss-convert sizes"}  # parsed apart, tested above
    assert set(COMMANDS) <= set(sections(PAGE.read_text()))


def test_every_option_is_explained():
    bare = [
        line
        for line in PAGE.read_text().splitlines()
        if re.match(r"\* `--[^`]*`(, `[^`]*`)*:? *(\(default.*)?$", line)
    ]
    assert bare == []


def test_prose_and_examples_name_options_that_exist(caught):
    text = PAGE.read_text()
    known = {o for command in COMMANDS for o in options_of(parser_of(command, caught))}
    known |= swift_options() | EVERYWHERE
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", re.sub("<!--.*?-->", "", text))) - known == set()


def swift_options() -> set[str]:
    """Options that ss-stream's own usage text names."""
    source = (ROOT / "apps/swift/Sources/ss-stream/Arguments.swift").read_text()
    usage = source.split('usage = """')[1].split('"""')[0]
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", usage)) - {"--record"}


def test_section_lists_the_options_of_ss_stream():
    assert listed_options(sections(PAGE.read_text())["ss-stream"]) == swift_options()


def test_lists_are_what_the_script_writes():
    """`python -m scripts.command_options` brings the page up to date."""
    from scripts.command_options import command_parsers, with_lists

    page = PAGE.read_text()
    assert with_lists(page, command_parsers()) == page
