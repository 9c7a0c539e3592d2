"""Changes of files as bytes: what transport, disks and editors do to them."""

from __future__ import annotations

import gzip
import re
from collections.abc import Sequence
from random import Random

STRINGS = re.compile(rb"[ -~]{4,}")
NAMES = (b"\x1b[31m", b"../../canary/canary.txt", b"a\0b", b"\xff\xfe\xff", b"%s%n{0}")


def mutate_bytes(data: bytes, rng: Random, others: Sequence[bytes]) -> tuple[bytes, str]:
    """Changed bytes and what was done. others: contents of other files, to splice or take instead."""
    kind = rng.choice(list(_KINDS))
    return _KINDS[kind](data, rng, others)


def _flip(data: bytes, rng: Random, others) -> tuple[bytes, str]:
    if not data:
        return b"\0", "one byte"
    changed, count = bytearray(data), rng.choice((1, 1, 1, 4, 64))
    at = [rng.randrange(len(data)) for _ in range(count)]
    for place in at:
        changed[place] ^= 1 << rng.randrange(8)
    return bytes(changed), f"bit flips at {at[:4]}"


def _flip_early(data: bytes, rng: Random, others) -> tuple[bytes, str]:
    """Headers decide how the rest is read."""
    head, text = _flip(data[:512], rng, others)
    return head + data[512:], text


def _cut(data: bytes, rng: Random, others) -> tuple[bytes, str]:
    end = rng.choice((0, 1, 7, 8, 9, len(data) // 2, max(len(data) - 1, 0), rng.randrange(len(data) + 1)))
    return data[:end], f"cut to {end} bytes"


def _insert(data: bytes, rng: Random, others) -> tuple[bytes, str]:
    at, count = rng.randrange(len(data) + 1), rng.choice((1, 2, 8, 100))
    return data[:at] + rng.randbytes(count) + data[at:], f"{count} bytes inserted at {at}"


def _delete(data: bytes, rng: Random, others) -> tuple[bytes, str]:
    at, count = rng.randrange(len(data) + 1), rng.choice((1, 2, 8, 100))
    return data[:at] + data[at + count :], f"{count} bytes deleted at {at}"


def _overwrite(data: bytes, rng: Random, others) -> tuple[bytes, str]:
    at, count = rng.randrange(len(data) + 1), rng.choice((1, 4, 8))
    value = rng.choice((b"\0", b"\xff", b"\x80", b"\x7f"))
    return data[:at] + value * count + data[at + count :], f"{count} times {value!r} at {at}"


def _splice(data: bytes, rng: Random, others) -> tuple[bytes, str]:
    other = rng.choice(others) if others else data
    at = rng.randrange(len(data) + 1)
    return data[:at] + other[rng.randrange(len(other) + 1) :], f"another file's end from {at} on"


def _other(data: bytes, rng: Random, others) -> tuple[bytes, str]:
    return (rng.choice(others) if others else b""), "another file's content"


def _text(data: bytes, rng: Random, others) -> tuple[bytes, str]:
    """A name inside the file, of the same length where that holds it."""
    found = list(STRINGS.finditer(data[:1_000_000]))
    if not found:
        return _overwrite(data, rng, others)
    place = rng.choice(found)
    name = rng.choice(NAMES)
    if len(name) <= len(place[0]):
        name += place[0][len(name) :]
    return data[: place.start()] + name + data[place.end() :], f"text {place[0][:20]!r} changed"


def _zeros(data: bytes, rng: Random, others) -> tuple[bytes, str]:
    return bytes(len(data)), "zeros of the same length"


def _noise(data: bytes, rng: Random, others) -> tuple[bytes, str]:
    return rng.randbytes(len(data)), "noise of the same length"


def mutate_gzip(data: bytes, rng: Random, others: Sequence[bytes]) -> tuple[bytes, str]:
    """Damage of a gzip file; now and then one that unpacks to far more than it is."""
    if rng.random() < 0.05:
        return gzip.compress(b" " * (1 << 27), 6, mtime=0), "128 MB of blanks in one line"
    if rng.random() < 0.1:
        return data + data, "two members"
    return mutate_bytes(data, rng, others)


_KINDS = {
    "flip": _flip,
    "flip early": _flip_early,
    "cut": _cut,
    "insert": _insert,
    "delete": _delete,
    "overwrite": _overwrite,
    "splice": _splice,
    "other": _other,
    "text": _text,
    "zeros": _zeros,
    "noise": _noise,
}
