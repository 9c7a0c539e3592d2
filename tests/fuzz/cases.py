"""A case: one file of a kind, damaged in one way, given to one command. Determined by seed and index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.fuzz.byte_mutations import mutate_bytes, mutate_gzip
from tests.fuzz.commands import COMMANDS, Command
from tests.fuzz.json_mutations import mutate_json
from tests.fuzz.kinds import KINDS
from tests.fuzz.library_settings import SETTINGS, set_library_setting
from tests.fuzz.place_mutations import UNREADABLE, choose_place, replace_file
from tests.fuzz.sandbox import Sandbox
from tests.fuzz.sealing import seal
from tests.fuzz.tensor_mutations import mutate_tensors
from tests.fuzz.toml_mutations import mutate_toml

# How often a file is replaced by something else, damaged as bytes, or (else) in a way of its format.
PLACE_SHARE, BYTES_SHARE, SEALED_SHARE = 0.06, 0.22, 0.85
# Of files that libraries read, how often one of their settings is put in.
SETTING_SHARE = 0.3
PIPE_SECONDS = 4.0


@dataclass(frozen=True)
class Case:
    """What a case is before it has run. place: what stands in the file's place, "" where it is damaged."""

    seed: int
    index: int
    kind: str
    command_name: str
    path: str
    place: str
    sealed: bool

    @property
    def id(self) -> str:
        return f"{self.seed}:{self.index}"

    @property
    def command(self) -> Command:
        return COMMANDS[self.command_name]

    @property
    def unprivileged(self) -> bool:
        return self.place == UNREADABLE

    def seconds(self, limit: float) -> float:
        """Time limit: a pipe that is opened waits forever, and there are many."""
        return min(limit, PIPE_SECONDS) if self.place == "pipe" else limit


def make_case(seed: int, index: int, kind: str | None = None, command: str | None = None) -> Case:
    """The case of that number. kind, command: what `--kind` and `--command` ask for."""
    rng = Random(f"{seed}:{index}")
    kinds = [k for k, about in KINDS.items() if kind in (None, k) and command in (None, *about.commands)]
    if not kinds:
        raise ValueError(f"no command '{command}' reads a '{kind}'")
    name = rng.choices(kinds, weights=[KINDS[k].weight for k in kinds])[0]
    readers = [command] if command else list(KINDS[name].commands)
    reader = rng.choices(readers, weights=[COMMANDS[r].weight for r in readers])[0]
    return Case(
        seed,
        index,
        name,
        reader,
        path=rng.choice(KINDS[name].paths),
        place=choose_place(rng) if rng.random() < PLACE_SHARE else "",
        sealed=rng.random() < SEALED_SHARE,
    )


def damage(case: Case, sandbox: Sandbox) -> str:
    """Damage the file in the sandbox. → what was done."""
    path, rng = sandbox.work / case.path, Random(f"{case.id} damage")
    if case.place:
        replace_file(path, case.place, sandbox.root)
        what = case.place
    else:
        data = path.read_bytes()
        if path.name in SETTINGS and rng.random() < SETTING_SHARE:
            changed, what = set_library_setting(path.name, data, rng)
        else:
            changed, what = _changed(data, KINDS[case.kind].format, rng, _others(case, sandbox))
        path.unlink()
        path.write_bytes(changed.replace(b"@ROOT@", str(sandbox.root).encode()))
        if changed == data:
            return f"nothing ({what})"
    if case.sealed and seal(sandbox.work, case.path):
        what += "; digests agree"
    return what


def _others(case: Case, sandbox: Sandbox) -> list[bytes]:
    """Contents of files of the same format, of which a part or all may take the file's place."""
    of_format = [p for k in KINDS.values() if k.format == KINDS[case.kind].format for p in k.paths]
    chosen = Random(f"{case.id} other").choice(of_format)
    path = sandbox.work / chosen
    return [path.read_bytes()] if path.is_file() else []


def _changed(data: bytes, form: str, rng: Random, others: list[bytes]) -> tuple[bytes, str]:
    own = _OWN_WAYS.get(form)
    if own is None or rng.random() < BYTES_SHARE:
        return mutate_bytes(data, rng, others)
    return own(data, rng)


def _mutate_lines(data: bytes, rng: Random) -> tuple[bytes, str]:
    """One line changed as JSON, repeated, or dropped."""
    lines = data.splitlines()
    if not lines:
        return b"null\n", "one line"
    at = rng.randrange(len(lines))
    if rng.random() < 0.1:
        lines = lines[:at] + lines[at + 1 :] if rng.random() < 0.5 else lines + [lines[at]] * 3
        what = "lines dropped or repeated"
    else:
        lines[at], what = mutate_json(lines[at], rng)
    return b"\n".join(lines) + b"\n", f"line {at + 1}: {what}"


_OWN_WAYS: dict[str, Callable[[bytes, Random], tuple[bytes, str]]] = {
    "json": mutate_json,
    "jsonl": _mutate_lines,
    "toml": mutate_toml,
    "tensors": mutate_tensors,
    "gzip": lambda data, rng: mutate_gzip(data, rng, ()),
}


def file_of(case: Case, sandbox: Sandbox) -> Path:
    """The damaged file."""
    return sandbox.work / case.path
