"""JSON and TOML from untrusted sources: strict, bounded, and typed by dataclasses (msgspec)."""

from __future__ import annotations

import math
import tomllib
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from ss_device.errors import UserError, one_line, printable

FILE_LIMIT = 1 << 28
"""Bytes of a JSON file: a bundle's manifest has some kilobytes, a large tokenizer 30 MB."""

TOML_LIMIT = 1 << 22
"""Bytes of a TOML file, which people write by hand."""

PLAIN = (str, int, float, bool)
Kind = TypeVar("Kind")


def decode(text: bytes | str, where: str) -> object:
    """The value of a JSON text. UserError, named by `where`, for NaN, lone surrogates, deep nesting …"""
    try:
        return msgspec.json.decode(text)
    except RecursionError as error:
        raise UserError(f"{where}: not valid JSON (nested too deeply)") from error
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({one_line(error)})") from error


def decode_object(text: bytes | str, where: str) -> dict:
    """As `decode`, of a JSON object alone."""
    value = decode(text, where)
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a JSON object")
    return value


def read_json(path: Path) -> dict:
    """A JSON object. A missing, overlong or malformed file is a UserError."""
    return decode_object(_content(path, FILE_LIMIT), str(path))


def _content(path: Path, limit: int) -> bytes:
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    size = path.stat().st_size
    if size > limit:
        raise UserError(f"{path}: {size} bytes, at most {limit} are read")
    return path.read_bytes()


def read_toml(path: Path) -> dict:
    """A TOML file. A missing, overlong or malformed one is a UserError."""
    content = _content(path, TOML_LIMIT)
    try:
        return tomllib.loads(content.decode())
    except RecursionError as error:
        raise UserError(f"{path}: not valid TOML (nested too deeply)") from error
    except ValueError as error:
        raise UserError(f"{path}: not valid TOML ({one_line(error)})") from error


def typed(kind: type[Kind], raw: object, where: str) -> Kind:
    """`raw` (of JSON or TOML) as a dataclass with its fields' types; unknown names are refused.

    Raises UserError that names `where` and the entry: another type, a missing or unknown name, a number
    that is not finite or beyond 64 bits.
    """
    _check_known(kind, raw, where)
    check_numbers(raw, where)
    try:
        return msgspec.convert(raw, kind)
    except UserError as error:  # of a dataclass that checks itself
        raise UserError(f"{where}: {error}") from error
    except (ValueError, RecursionError, OverflowError) as error:
        raise UserError(f"{where}: missing or wrong entry ({_explained(error)})") from error


def _explained(error: BaseException) -> str:
    """msgspec's message with its path as people write it: `x.y[0]` for `$.x.y[0]`."""
    return one_line(error).replace("`$.", "`").replace("`", "'")


def _check_known(hint: object, raw: object, where: str) -> None:
    """Refuse names that the dataclasses inside `hint` do not have: a typing error, or a newer format."""
    parts = get_args(hint)
    if is_dataclass(hint):
        hints = _hints(hint)
        for name, value in raw.items() if isinstance(raw, dict) else ():
            if name not in hints:
                known = ", ".join(sorted(hints))
                raise UserError(f"{where}: unknown entry '{printable(str(name)):.80}' (expected {known})")
            _check_known(hints[name], value, where)
    elif get_origin(hint) in (Union, UnionType):
        for part in parts:
            _check_known(part, raw, where)
    elif parts and isinstance(raw, dict) and parts[-1] not in PLAIN:
        for value in raw.values():
            _check_known(parts[-1], value, where)
    elif parts and isinstance(raw, list | tuple) and parts[0] not in PLAIN:
        for value in raw:
            _check_known(parts[0], value, where)


@cache
def _hints(kind: type) -> dict[str, object]:
    return get_type_hints(kind)


def check_numbers(raw: object, where: str) -> None:
    """UserError, beginning with `where`, for a number that is not finite or beyond 64 bits."""
    pending = [raw]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, list | tuple):
            pending.extend(value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{where}: holds {value}, expected finite numbers")
        elif isinstance(value, int) and abs(value) >= 1 << 63:
            raise UserError(f"{where}: holds a number beyond 64 bits")
