"""What a folder holds, copies of it with a write half done, and what differs between two of them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.operations import WRITES, Operation

# What tells the time in logs and records.
CLOCKS = {
    "seconds", "eta", "tokens_per_second", "prompts_per_second", "load_average", "before", "checked",
}  # fmt: skip
# By which Core ML packages name their parts; new ones in every run.
IDENTIFIER = re.compile(rb"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
IGNORED = (".lock",)
"""Files that hold nothing and may stand anywhere: those that processes lock."""

Contents = dict[str, bytes]
FOLDER = b"<folder>"


def contents(folder: Path, name: str = ".") -> Contents:
    """Relative path → bytes of everything in `folder` (or of the file or folder `name` in it)."""
    start = folder / name
    if start.is_file():
        return {name: start.read_bytes()}
    found: Contents = {}
    for place, folders, files in os.walk(start):
        for entry in folders:
            found[os.path.relpath(os.path.join(place, entry), folder)] = FOLDER
        for entry in files:
            path = os.path.join(place, entry)
            if not entry.endswith(IGNORED):
                found[os.path.relpath(path, folder)] = Path(path).read_bytes()
    if start.is_dir() and name != ".":
        found[name] = FOLDER
    return found


def digest(folder: Path) -> str:
    """A name for the state of a folder."""
    found = hashlib.sha256()
    for name, content in sorted(contents(folder).items()):
        found.update(f"{name}\0{len(content)}\0".encode() + content)
    return found.hexdigest()


def copy_of(folder: Path, target: Path, half: Operation | None = None) -> Path:
    """A copy of a folder. half: a write of which the first half has happened there."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target, symlinks=True)
    if half is not None and half.kind in WRITES:
        file = target / os.path.relpath(half.paths[0], folder)
        with open(file, "r+b") as opened:
            opened.seek(0, os.SEEK_END) if half.offset is None else opened.seek(half.offset)
            opened.write(half.data[: len(half.data) // 2])
    return target


@dataclass
class Volatile:
    """What differs between two runs that nothing disturbed: values of JSON files, and whole files."""

    values: dict[str, set[str]] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)

    def learn(self, one: Contents, other: Contents) -> None:
        """Take note of what differs."""
        for name in one.keys() & other.keys():
            if same(one[name], other[name], name, self):
                continue
            pair = [_json_values(name, content) for content in (one[name], other[name])]
            if None in pair:
                self.files.add(name)
                continue
            first, second = pair
            known = self.values.setdefault(name, set())
            known |= {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}


def same(one: bytes, other: bytes, name: str, volatile: Volatile) -> bool:
    """Whether two versions of a file say the same, apart from what is volatile."""
    if one == other or name in volatile.files:
        return True
    pair = [_json_values(name, content) for content in (one, other)]
    if None in pair:
        return False
    known = volatile.values.get(name, set())
    first, second = ({k: v for k, v in values.items() if k not in known} for values in pair)
    return first == second


def differences(wanted: Contents, found: Contents, volatile: Volatile) -> list[str]:
    """Files that are missing, too many, or not the same."""
    lines = [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    lines += [f"{name} is left over" for name in sorted(found.keys() - wanted.keys())]
    common = sorted(wanted.keys() & found.keys())
    lines += [f"{n} differs" for n in common if not same(wanted[n], found[n], n, volatile)]
    return lines


def _json_values(name: str, content: bytes) -> dict[str, object] | None:
    """Path inside the JSON → value, without clocks; None for what is no JSON."""
    if not name.endswith((".json", ".jsonl")):
        return None
    content = IDENTIFIER.sub(b"identifier", content)
    try:
        rows = content.decode().splitlines() if name.endswith(".jsonl") else [content.decode()]
        return {f"{i}{k}": v for i, row in enumerate(rows) for k, v in _leaves(_parsed(row)).items()}
    except ValueError:
        return None


def _parsed(text: str) -> object:
    """JSON in which entries that are named by identifiers alone are a list, in an order of their own."""

    def made(pairs: list[tuple[str, object]]) -> object:
        if all(name == "identifier" for name, _ in pairs):
            return sorted((value for _, value in pairs), key=json.dumps)
        return dict(pairs)

    return json.loads(text, object_pairs_hook=made)


def _leaves(value: object) -> dict[str, object]:
    if isinstance(value, dict):
        items = [(k, v) for k, v in value.items() if k not in CLOCKS]
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return {"": value}
    leaves = {f"/{key}{rest}": leaf for key, v in items for rest, leaf in _leaves(v).items()}
    return leaves or {"": type(value).__name__}
