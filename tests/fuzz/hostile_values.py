"""Values that readers should refuse or survive, as JSON text."""

from __future__ import annotations

import json
from random import Random

DEPTH = 100_000
VALUES = {
    "null": "null",
    "true": "true",
    "false": "false",
    "zero": "0",
    "one": "1",
    "minus one": "-1",
    "two": "2",
    "half": "0.5",
    "2^31": str(1 << 31),
    "2^40": str(1 << 40),
    "2^63": str(1 << 63),
    "2^64": str(1 << 64),
    "-2^63": str(-(1 << 63)),
    "100,000 digits": "9" * 100_000,
    "NaN": "NaN",
    "Infinity": "Infinity",
    "-Infinity": "-Infinity",
    "1e308": "1e308",
    "1e999": "1e999",
    "tiny number": "1e-320",
    "empty text": '""',
    "text": '"text"',
    "number as text": '"4"',
    "long text": '"' + "x" * 1_000_000 + '"',
    "empty list": "[]",
    "empty object": "{}",
    "list of null": "[null]",
    "list of lists": "[[1, 2], [3]]",
    "object": '{"a": 1}',
    "deep list": "[" * DEPTH + "]" * DEPTH,
    "deep object": '{"a":' * DEPTH + "1" + "}" * DEPTH,
    "long list": "[" + "0," * 100_000 + "0]",
    "escape sequence": json.dumps("\x1b[31mred\x1b[0m"),
    "bell and backspace": json.dumps("a\x07\x08\x08b"),
    "line break": json.dumps("first\nerror: second"),
    "NUL": json.dumps("a\0b"),
    "C1 control": json.dumps("\x9b31mred", ensure_ascii=False),
    "right-to-left mark": json.dumps("a\u202eb", ensure_ascii=False),
    "lone surrogate": r'"\ud800"',
    "parent path": '"../canary/canary.safetensors"',
    "parents' path": '"../../canary/canary.json"',
    "path to weights": '"../../../canary/canary.safetensors"',
    "far path": '"../../../../../../canary/canary.txt"',
    "absolute path": '"@ROOT@/canary/canary.safetensors"',
    "device": '"/dev/zero"',
    "folder": '"."',
    "markup": '"[bold]x[/nothing]"',
    "percent and braces": '"{a} {0.__class__} %s"',
    "template code": "\"{{ ''.__class__.__mro__ }}{% for i in range(10**9) %}{% endfor %}\"",
}


def hostile_value(rng: Random) -> tuple[str, str]:
    """Name and JSON text of one of `VALUES`. `@ROOT@` stands for the sandbox's root."""
    name = rng.choice(list(VALUES))
    return name, VALUES[name]


def nearby_number(value: int | float, rng: Random) -> tuple[str, str]:
    """A number not far from a right one: what range checks are about."""
    change = rng.choice((-1, 1, 2, -value, value, 10 * value, 1_000_000))
    return f"{value} → {value + change}", json.dumps(value + change)
