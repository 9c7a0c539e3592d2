"""Settings as frozen dataclasses whose fields carry their help; a command's options are made from them.

    @dataclass(frozen=True)
    class TrainingSettings:
        epochs: float = setting(5.0, help="passes over the data")
        seed: int = setting(0, help="of weights and data order")

    add_settings(parser, TrainingSettings)                      # --epochs X, --seed N
    settings = settings_of(parser.parse_args(), TrainingSettings)

As peft's configurations do it: Python callers read the same words as those who type `--help`.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

Settings = TypeVar("Settings")
METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


def setting(
    default: Any = None,
    *,
    help: str,
    flag: str | None = None,
    choices: Collection | None = None,
    metavar: str | None = None,
    parse: Callable[[str], Any] | None = None,
    group: str | None = None,
) -> Any:
    """A field of a settings class.

    A tuple is an option that may be repeated. flag: the option's name (None: the field's own, `num_kept` →
    `--num-kept`); parse: text → value (None: the field's type); group: heading in the help that the option
    stands under. An option that is not given leaves the default.
    """
    metadata = {
        "help": help,
        "flag": flag,
        "choices": choices,
        "metavar": metavar,
        "parse": parse,
        "group": group,
    }
    return dataclasses.field(default=default, metadata=metadata)


def add_settings(
    parser: argparse.ArgumentParser, settings: type, *, only: Collection[str] | None = None
) -> None:
    """One option for every field made by `setting`; only: names of the fields that the command has."""
    groups: dict[str, argparse._ActionsContainer] = {}
    hints = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        if "help" not in field.metadata or (only is not None and field.name not in only):
            continue
        heading = field.metadata["group"]
        if heading is not None and heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        _add_option(groups.get(heading, parser), field, hints[field.name])


def settings_of(arguments: argparse.Namespace, settings: type[Settings], **others: Any) -> Settings:
    """The settings that the parsed options say; others: fields that are not options of this command."""
    names = [field.name for field in dataclasses.fields(settings) if field.init]
    said = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    said = {name: tuple(value) if isinstance(value, list) else value for name, value in said.items()}
    return settings(**{**said, **others})


def flag_of(settings: type, name: str) -> str:
    """The option that sets a field, for messages: `--kv-bits`."""
    field = next(f for f in dataclasses.fields(settings) if f.name == name)
    return field.metadata.get("flag") or "--" + name.replace("_", "-")


def _add_option(place: argparse._ActionsContainer, field: dataclasses.Field, hint: Any) -> None:
    about, kind = field.metadata, _plain_type(hint)
    words: dict[str, Any] = {"dest": field.name, "default": field.default, "help": about["help"]}
    flag = about["flag"] or "--" + field.name.replace("_", "-")
    if typing.get_origin(kind) is tuple and about["parse"] is None:
        # May be repeated. Without a default of argparse's own, to which it would append.
        words |= {"action": "append", "default": argparse.SUPPRESS, "metavar": about["metavar"]}
    elif kind is bool:
        # A flag that is off can be said; one that is on, or undecided, must also be denied.
        words["action"] = "store_true" if field.default is False else argparse.BooleanOptionalAction
    else:
        words["type"] = about["parse"] or kind
        words["choices"] = about["choices"]
        words["metavar"] = about["metavar"] or (None if about["choices"] else METAVARS.get(kind))
    place.add_argument(flag, **words)


def _plain_type(hint: Any) -> Any:
    """`int` of `int | None`; a union of several types has to be given a `parse`, and counts as text."""
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return kinds[0] if len(kinds) == 1 else str
    return hint
