"""A command's options are the fields of its settings."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import pytest

from ss_device.command_line import positive
from ss_device.errors import UserError
from ss_device.settings import add_settings, changed, flag_of, setting, settings_of


@dataclass(frozen=True)
class Everything:
    epochs: float = setting(5.0, help="passes over the data")
    num_nodes: int | None = setting(None, help="nodes", flag="--nodes", parse=positive, group="trees")
    shape: str = setting("chain", help="shape", choices=("chain", "k-ary"), group="trees")
    folder: Path | None = setting(help="where")
    fast: bool = setting(False, help="be fast")
    pad: bool | None = setting(None, help="pad the state")
    parts: int | str = setting(1, help="parts", parse=lambda text: text if text == "auto" else int(text))
    hosts: tuple[str, ...] = setting((), help="also these", flag="--host")
    private: int = 3
    names: tuple[str, ...] = setting(("x",), help="names", flag="--name", choices=("x", "y"))
    output: Path | None = setting(help="output", exclusive="place", aliases=("--out",))
    into: Path | None = setting(help="into", exclusive="place")
    golden: bool = setting(True, help="no traces", flag="--no-golden", action="store_false")


def parsed(*words: str, **kwargs) -> Everything:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_settings(parser, Everything, **kwargs)
    return settings_of(parser.parse_args(words), Everything)


def test_nothing_said_is_the_defaults():
    assert parsed() == Everything()


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (("--epochs", "2"), "epochs", 2.0),
        (("--nodes", "7"), "num_nodes", 7),
        (("--shape", "k-ary"), "shape", "k-ary"),
        (("--folder", "a/b"), "folder", Path("a/b")),
        (("--fast",), "fast", True),
        (("--pad",), "pad", True),
        (("--no-pad",), "pad", False),
        (("--parts", "auto"), "parts", "auto"),
        (("--parts", "3"), "parts", 3),
        (("--host", "a", "--host", "b"), "hosts", ("a", "b")),
        (("--name", "y"), "names", ("y",)),
        (("--name", "y", "--name", "x"), "names", ("y", "x")),
        (("--out", "a"), "output", Path("a")),
        (("--no-golden",), "golden", False),
    ],
)
def test_an_option_sets_its_field_alone(words, field, value):
    found = parsed(*words)
    assert getattr(found, field) == value and type(getattr(found, field)) is type(value)
    others = [name for name in Everything.__dataclass_fields__ if name != field]
    assert all(getattr(found, name) == getattr(Everything(), name) for name in others)


@pytest.mark.parametrize(
    "words",
    [
        ("--nodes", "0"),
        ("--epochs", "many"),
        ("--shape", "star"),
        ("--private", "4"),
        ("--name", "z"),
        ("--output", "a", "--into", "b"),
        ("--golden",),
    ],
)
def test_what_does_not_fit_is_refused(words):
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parsed(*words)


def test_a_command_may_have_some_of_the_fields():
    assert parsed("--epochs", "1", only=("epochs",)).epochs == 1
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parsed("--fast", only=("epochs",))


def test_help_names_groups_and_flags():
    parser = argparse.ArgumentParser()
    add_settings(parser, Everything)
    text = parser.format_help()
    assert "trees:\n  --nodes N" in text and "--shape {chain,k-ary}" in text
    assert "passes over the data" in text and "private" not in text
    assert flag_of(Everything, "num_nodes") == "--nodes" and flag_of(Everything, "fast") == "--fast"


def test_python_callers_change_fields_by_name():
    found = changed(Everything(), folder="a/b", num_nodes=7, fast=True, parts="auto", names=("y", "x"))
    assert found == Everything(folder=Path("a/b"), num_nodes=7, fast=True, parts="auto", names=("y", "x"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"nodes": 7}, "there is no setting 'nodes' (known: epochs, num_nodes, "),
        ({"num_nodes": "7"}, "num_nodes '7' is not a whole number"),
        ({"num_nodes": True}, "num_nodes True is not a whole number"),
        ({"epochs": None}, "epochs None is not a number"),
        ({"fast": 1}, "fast 1 is not True or False"),
        ({"parts": 1.5}, "parts 1.5 is not a whole number or text"),
        ({"shape": "star"}, "shape 'star' is not one of chain, k-ary"),
        ({"names": ("x", "z")}, "names 'z' is not one of x, y"),
        ({"output": "a", "into": "b"}, "output and into exclude each other"),
    ],
)
def test_python_callers_are_told_what_does_not_fit(changes, says):
    with pytest.raises(UserError) as refused:
        changed(Everything(), **changes)
    assert str(refused.value).startswith(says)
