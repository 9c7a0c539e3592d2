"""Damaged JSON, TOML, bytes and safetensors as Hypothesis strategies, which shrink to the least damage."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Iterator

from hypothesis import strategies as st

from tests.fuzz.json_mutations import places_of
from tests.fuzz.tensor_mutations import joined

NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2, 1 << 31, 1 << 40, 1 << 64, -(1 << 63), 10**400]),
    st.integers(-100, 100),
    st.floats(),
)
TEXTS = st.one_of(
    st.sampled_from(["", "\x1b[31m", "a\0b", "\ud800", "../x", "/dev/zero", "text", "x" * 5000, "4"]),
    st.text(max_size=8),
)
# Python writes no number of so many digits: a mark stands for it.
DIGITS = "@digits@"
PLAIN = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS, st.just(DIGITS))
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
DEEP = st.sampled_from(["[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000])


@st.composite
def damaged_values(draw, sound: dict | list):
    """A sound value with one or two entries replaced, removed or added."""
    value = copy.deepcopy(sound)
    for _ in range(draw(st.integers(1, 2))):
        places = list(places_of(value))
        if not places:
            return draw(VALUES)
        holder, key = draw(st.sampled_from(range(len(places))).map(places.__getitem__))
        match draw(st.sampled_from(["replace", "remove", "add"])):
            case "replace":
                holder[key] = draw(VALUES)
            case "remove":
                del holder[key]
            case "add" if isinstance(holder, dict):
                holder[draw(TEXTS)] = draw(VALUES)
            case _:
                holder.append(draw(VALUES))
    return value


@st.composite
def damaged_json(draw, sound: bytes) -> bytes:
    """A JSON text: a damaged value, one far too deep, any value at all, or damaged bytes."""
    match draw(st.sampled_from(["value", "value", "value", "deep", "any", "bytes"])):
        case "value":
            return _text(draw(damaged_values(json.loads(sound))))
        case "deep":
            return draw(DEEP).encode()
        case "any":
            return _text(draw(VALUES))
        case _:
            return draw(damaged_bytes(sound))


def _text(value: object) -> bytes:
    text = json.dumps(value).replace(json.dumps(DIGITS), "9" * 5000)
    return text.encode("utf-8", "surrogatepass")


@st.composite
def damaged_bytes(draw, sound: bytes) -> bytes:
    """Bytes changed, inserted or cut off."""
    data = bytearray(sound)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.sampled_from(["change", "insert", "cut"])):
            case "change" if data:
                data[at] = draw(st.integers(0, 255))
            case "insert":
                data[at:at] = draw(st.binary(max_size=8))
            case _:
                del data[at:]
    return bytes(data)


@st.composite
def damaged_tensors(draw, sound: bytes) -> bytes:
    """A safetensors file with another header, another length of it, or damaged bytes."""
    length = struct.unpack("<Q", sound[:8])[0]
    header, body = sound[8 : 8 + length], sound[8 + length :]
    match draw(st.sampled_from(["header", "header", "length", "bytes"])):
        case "header":
            return joined(draw(damaged_json(header)), body)
        case "length":
            return struct.pack("<Q", draw(st.integers(0, (1 << 64) - 1))) + sound[8:]
        case _:
            return draw(damaged_bytes(sound))


@st.composite
def damaged_lines(draw, sound: bytes) -> bytes:
    """JSON lines, one of them damaged."""
    lines = sound.splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    lines[at] = draw(damaged_json(lines[at]))
    return b"\n".join(lines) + b"\n"


@st.composite
def damaged_toml(draw, sound: bytes) -> bytes:
    """One value of a TOML text replaced, a line removed, or damaged bytes."""
    lines = sound.decode().splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    match draw(st.sampled_from(["value", "value", "remove", "bytes"])):
        case "value":
            key = lines[at].partition(" = ")[0]
            lines[at] = f"{key} = {draw(_toml_values())}"
        case "remove":
            del lines[at]
        case _:
            return draw(damaged_bytes(sound))
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _toml_values() -> Iterator[str]:
    written = st.recursive(
        st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=4,
    ).map(json.dumps)
    return written | st.sampled_from(
        ["nan", "-inf", "1979-05-27", "{ a = 1 }", "[" * 10_000 + "]" * 10_000]
    )
