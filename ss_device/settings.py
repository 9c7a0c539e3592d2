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

from ss_device.errors import UserError

Settings = TypeVar("Settings")
METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
KINDS = {int: "a whole number", float: "a number", str: "text", bool: "True or False", Path: "a path"}


def setting(
    default: Any = None,
    *,
    help: str,
    flag: str | None = None,
    choices: Collection | None = None,
    metavar: str | None = None,
    parse: Callable[[str], Any] | None = None,
    group: str | None = None,
    aliases: tuple[str, ...] = (),
    exclusive: str | None = None,
    **words: Any,
) -> Any:
    """A field of a settings class.

    A tuple is an option that may be repeated. flag: the option's name (None: the field's own, `num_kept` →
    `--num-kept`); parse: text → value, of a tuple the whole (None: the field's type); group: heading in
    the help that the option stands under; aliases: further names of the option; exclusive: at most one of
    the options with this mark may be given; words: what else `add_argument` takes, as `required=True`. An
    option that is not given leaves the default.
    """
    metadata = {
        "help": help,
        "flag": flag,
        "choices": choices,
        "metavar": metavar,
        "parse": parse,
        "group": group,
        "aliases": aliases,
        "exclusive": exclusive,
        "words": words,
    }
    return dataclasses.field(default=default, metadata=metadata)


def add_settings(
    parser: argparse.ArgumentParser, settings: type, *, only: Collection[str] | None = None
) -> None:
    """One option for every field made by `setting`; only: names of the fields that the command has."""
    groups: dict[str, argparse._ActionsContainer] = {}
    exclusive: dict[str, argparse._ActionsContainer] = {}
    hints = typing.get_type_hints(settings)
    fields = [field for field in dataclasses.fields(settings) if "help" in field.metadata]
    # Usage lines name the options in the order of the help: those without a heading first.
    for field in sorted(fields, key=lambda field: field.metadata["group"] is not None):
        if only is not None and field.name not in only:
            continue
        heading, mark = field.metadata["group"], field.metadata["exclusive"]
        if heading is not None and heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        place = groups.get(heading, parser)
        if mark is not None:
            if mark not in exclusive:
                exclusive[mark] = place.add_mutually_exclusive_group()
            place = exclusive[mark]
        _add_option(place, field, hints[field.name])


def settings_of(arguments: argparse.Namespace, settings: type[Settings], **others: Any) -> Settings:
    """The settings that the parsed options say; others: fields that are not options of this command."""
    names = [field.name for field in dataclasses.fields(settings) if field.init]
    said = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    said = {name: tuple(value) if isinstance(value, list) else value for name, value in said.items()}
    return settings(**{**said, **others})


def changed(settings: Settings, **changes: Any) -> Settings:
    """Settings with some fields changed, for Python callers: text will do for a path.

    Raises UserError for a name that is no field, and for values as `check_values` does.
    """
    hints = typing.get_type_hints(type(settings))
    for name, value in changes.items():
        if name not in hints:
            raise UserError(f"there is no setting '{name}' (known: {', '.join(hints)})")
        if _plain_type(hints[name]) is Path and isinstance(value, str):
            changes[name] = Path(value)
    made = dataclasses.replace(settings, **changes)
    check_values(made)
    return made


def check_values(settings: object) -> None:
    """Raise UserError for what the options of a command would refuse.

    A value that is not of its field's type or not among its choices (None passes where it is the default),
    and two fields that exclude each other.
    """
    hints = typing.get_type_hints(type(settings))
    given: dict[str, str] = {}
    for field in dataclasses.fields(settings):
        value, kinds = getattr(settings, field.name), _kinds(hints[field.name])
        if value is None and field.default is None:
            continue
        mark = field.metadata.get("exclusive")
        if mark is not None and value != field.default:
            if mark in given:
                raise UserError(f"{given[mark]} and {field.name} exclude each other")
            given[mark] = field.name
        choices = field.metadata.get("choices")
        for one in value if isinstance(value, tuple) else (value,):
            if choices is not None and one not in choices:
                raise UserError(f"{field.name} {one!r:.60} is not one of {', '.join(map(str, choices))}")
        if set(kinds) <= set(KINDS) and not _fits(value, kinds):
            raise UserError(f"{field.name} {value!r:.60} is not {' or '.join(KINDS[k] for k in kinds)}")


def _fits(value: object, kinds: tuple[type, ...]) -> bool:
    """Whether a value is of one of the types. In Python True is a whole number; in settings it is not."""
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, (*kinds, int) if float in kinds else kinds)


def flag_of(settings: type, name: str) -> str:
    """The option that sets a field, for messages: `--kv-bits`."""
    field = next(f for f in dataclasses.fields(settings) if f.name == name)
    return field.metadata.get("flag") or "--" + name.replace("_", "-")


def _add_option(place: argparse._ActionsContainer, field: dataclasses.Field, hint: Any) -> None:
    about, kind = field.metadata, _plain_type(hint)
    words: dict[str, Any] = {"dest": field.name, "default": field.default, "help": about["help"]}
    flags = (about["flag"] or "--" + field.name.replace("_", "-"), *about["aliases"])
    if typing.get_origin(kind) is tuple and about["parse"] is None:
        # May be repeated. Without a default of argparse's own, to which it would append.
        words |= {"action": "append", "default": argparse.SUPPRESS, "metavar": about["metavar"]}
        words |= {"type": typing.get_args(kind)[0], "choices": about["choices"]}
    elif kind is bool:
        # A flag that is off can be said; one that is on, or undecided, must also be denied.
        words["action"] = "store_true" if field.default is False else argparse.BooleanOptionalAction
    else:
        words["type"] = about["parse"] or kind
        words["choices"] = about["choices"]
        words["metavar"] = about["metavar"] or (None if about["choices"] else METAVARS.get(kind))
    place.add_argument(*flags, **words | about["words"])


def _plain_type(hint: Any) -> Any:
    """`int` of `int | None`; a union of several types has to be given a `parse`, and counts as text."""
    kinds = _kinds(hint)
    return kinds[0] if len(kinds) == 1 else str


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The types of a union without None; any other type by itself."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return tuple(kind for kind in typing.get_args(hint) if kind is not type(None))
    return (hint,)
