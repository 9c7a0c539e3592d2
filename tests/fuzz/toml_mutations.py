"""Changes of TOML texts, line by line: values of other types and sizes, missing, repeated and new keys."""

from __future__ import annotations

import json
from random import Random

from tests.fuzz.hostile_values import DEPTH, VALUES

# TOML's own spellings of what JSON writes in another way.
OWN = {
    "NaN": "nan",
    "Infinity": "inf",
    "-Infinity": "-inf",
    "date": "1979-05-27",
    "time": "07:32:00",
    "table": "{ a = 1 }",
    "hexadecimal": "0xffffffffffffffffffff",
    "deep list": "[" * DEPTH + "]" * DEPTH,
}
LEFT_OUT = ("null", "deep object", "empty object", "object")


def mutate_toml(text: bytes, rng: Random) -> tuple[bytes, str]:
    """A changed text and what was done to it."""
    lines = text.decode("utf-8", "replace").splitlines()
    at = rng.randrange(len(lines))
    key, separator, _ = lines[at].partition(" = ")
    if separator and rng.random() < 0.75:
        name, value = _value(rng)
        lines[at] = f"{key} = {value}"
        what = f"{key} = {name}"
    else:
        what = _rearranged(lines, at, rng)
    return "\n".join(lines).encode("utf-8", "surrogatepass") + b"\n", what


def _value(rng: Random) -> tuple[str, str]:
    known = {name: value for name, value in VALUES.items() if name not in LEFT_OUT} | OWN
    name = rng.choice(list(known))
    return name, known[name]


def _rearranged(lines: list[str], at: int, rng: Random) -> str:
    line = lines[at]
    match rng.randrange(5):
        case 0:
            del lines[at]
            return f"line {at + 1} removed"
        case 1:
            lines.insert(at, line)
            return f"line {at + 1} twice"
        case 2:
            name = rng.choice(("another", '"\\u001b[31m"', '"../x"', "steps", json.dumps("x" * 1000)))
            lines.insert(at, f"{name} = 1")
            return f"key {name[:20]} added before line {at + 1}"
        case 3:
            lines.insert(at, rng.choice(("[model]", "[[sources]]", "[stop]", "[data]", "[x.y.z]")))
            return f"table begun before line {at + 1}"
        case _:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], line
            return f"lines {at + 1} and {other + 1} swapped"
