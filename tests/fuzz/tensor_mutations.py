"""Changes of safetensors files: their header's JSON, its length, and the numbers behind it."""

from __future__ import annotations

import json
import struct
from random import Random

from tests.fuzz.json_mutations import mutate_json

DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "U32", "BOOL", "F8_E4M3", "X1", "")
SPECIAL = {
    "F16": (b"\x00\x7e", b"\x00\x7c", b"\x00\xfc", b"\xff\x7b"),
    "BF16": (b"\xc0\x7f", b"\x80\x7f", b"\x7f\x7f"),
    "F32": (b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f"),
    "I32": (b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80"),
    "I64": (b"\xff" * 8, b"\xff" * 7 + b"\x7f"),
    "U8": (b"\xff", b"\x00"),
}


def mutate_tensors(data: bytes, rng: Random) -> tuple[bytes, str]:
    """A changed file and what was done to it. What is no safetensors file stays as it is."""
    try:
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])
    except (struct.error, ValueError):
        return data, "nothing: no safetensors file"
    kind = rng.choices(list(_KINDS), weights=[w for _, w in _KINDS.values()])[0]
    return _KINDS[kind][0](header, data[8 + length :], rng)


def joined(header: dict | bytes, body: bytes) -> bytes:
    """A file of a header and the numbers behind it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def _header_json(header: dict, body: bytes, rng: Random) -> tuple[bytes, str]:
    text, what = mutate_json(json.dumps(header).encode(), rng)
    return joined(text, body), f"header: {what}"


def _length(header: dict, body: bytes, rng: Random) -> tuple[bytes, str]:
    text = json.dumps(header).encode()
    length = rng.choice((0, 1, 2, len(text) - 1, len(text) + 1, 1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1))
    return struct.pack("<Q", length) + text + body, f"header length {length}"


def _not_text(header: dict, body: bytes, rng: Random) -> tuple[bytes, str]:
    text = json.dumps(header).encode().replace(b'"', b"\xff", 1)
    return joined(text, body), "header is not UTF-8"


def _dtype(header: dict, body: bytes, rng: Random) -> tuple[bytes, str]:
    name = _tensor(header, rng)
    dtype = header[name]["dtype"] = rng.choice(DTYPES)
    return joined(header, body), f"{name}: dtype {dtype}"


def _shape(header: dict, body: bytes, rng: Random) -> tuple[bytes, str]:
    """Another shape of as many numbers, of none, or of too many."""
    name = _tensor(header, rng)
    shape = list(header[name]["shape"])
    changed = rng.choice((shape[::-1], [*shape, 1], [1, *shape], shape[:-1], [0, *shape], [-1, *shape[1:]],
                          [1 << 40, *shape[1:]], [1 << 33, 1 << 33], []))  # fmt: skip
    header[name]["shape"] = changed
    return joined(header, body), f"{name}: shape {changed}"


def _resized(header: dict, body: bytes, rng: Random) -> tuple[bytes, str]:
    """A sound file in which one tensor has fewer or more rows than expected."""
    name = _tensor(header, rng)
    start, end = header[name]["data_offsets"]
    shape = header[name]["shape"]
    if not shape or shape[0] < 1:
        return _dtype(header, body, rng)
    row, rows = (end - start) // shape[0], rng.choice((0, 1, shape[0] - 1, shape[0] + 1))
    change = (rows - shape[0]) * row
    piece = (body[start:end] + bytes(row))[: rows * row]
    for entry in header.values():
        if "data_offsets" in entry and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [offset + change for offset in entry["data_offsets"]]
    header[name] |= {"shape": [rows, *shape[1:]], "data_offsets": [start, start + rows * row]}
    return joined(header, body[:start] + piece + body[end:]), f"{name}: {rows} rows"


def _offsets(header: dict, body: bytes, rng: Random) -> tuple[bytes, str]:
    name, other = _tensor(header, rng), _tensor(header, rng)
    start, end = header[name]["data_offsets"]
    changed = rng.choice(([end, start], [start, end + 2], [start - 2, end], [-2, end], [0, 1 << 50],
                          header[other]["data_offsets"], [start], [start + 1, end + 1]))  # fmt: skip
    header[name]["data_offsets"] = changed
    return joined(header, body), f"{name}: offsets {changed}"


def _special_number(header: dict, body: bytes, rng: Random) -> tuple[bytes, str]:
    """NaN, infinities, the largest numbers: one, or a whole tensor of them."""
    name = _tensor(header, rng)
    start, end = header[name]["data_offsets"]
    value = rng.choice(SPECIAL.get(header[name]["dtype"], (b"\xff",)))
    count = max((end - start) // len(value), 1)
    if rng.random() < 0.5:
        at = start + len(value) * rng.randrange(count)
        changed = body[:at] + value + body[at + len(value) :]
    else:
        changed = body[:start] + value * count + body[end:]
    return joined(header, changed[: len(body)]), f"{name}: {value.hex()}"


def _removed(header: dict, body: bytes, rng: Random) -> tuple[bytes, str]:
    """A sound file without one tensor, its bytes left to another of that size or gone from the end."""
    name = _tensor(header, rng)
    start, end = header.pop(name)["data_offsets"]
    for entry in header.values():
        if "data_offsets" in entry and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [offset - (end - start) for offset in entry["data_offsets"]]
    return joined(header, body[:start] + body[end:]), f"{name} removed"


def _renamed(header: dict, body: bytes, rng: Random) -> tuple[bytes, str]:
    name = _tensor(header, rng)
    new = rng.choice(
        (
            name + "x",
            "",
            "\x1b[31m",
            "../x",
            name.replace("0", "99"),
            "a" * 100_000,
            name.upper(),
            name.replace(".weight", ""),
            "layers.-1.attn.q.weight",
            "\ud800",
        )
    )
    entry = header.pop(name)
    header[new] = entry
    return joined(header, body), f"{name} named {new[:30]!r}"


def _metadata(header: dict, body: bytes, rng: Random) -> tuple[bytes, str]:
    text, what = mutate_json(json.dumps(header.get("__metadata__", {"format": "pt"})).encode(), rng)
    header["__metadata__"] = "@metadata@"
    whole = json.dumps(header).encode().replace(b'"@metadata@"', text, 1)
    return joined(whole, body), f"metadata: {what}"


def _tensor(header: dict, rng: Random) -> str:
    return rng.choice([name for name in header if name != "__metadata__"])


_KINDS = {
    "header": (_header_json, 6),
    "length": (_length, 2),
    "not text": (_not_text, 1),
    "dtype": (_dtype, 3),
    "shape": (_shape, 3),
    "resized": (_resized, 4),
    "offsets": (_offsets, 3),
    "special": (_special_number, 4),
    "removed": (_removed, 2),
    "renamed": (_renamed, 2),
    "metadata": (_metadata, 2),
}
