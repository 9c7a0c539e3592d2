"""Which commands are raced: the pairs, what stands there before, what of the outcome is compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.faults.commands import BASE, COMMANDS, GENERATE, TUNE, Command
from tests.faults.snapshots import Contents


def _all(found: Contents) -> Contents:
    return found


def _tuned(found: Contents) -> Contents:
    """Times differ from run to run: of a tuning it counts whose entries it has."""
    raw = json.loads(found.get("bundle/tuning.json", b'{"devices": {}}'))
    keys = sorted(key for entries in raw["devices"].values() for key in entries)
    return {**found, "bundle/tuning.json": json.dumps(keys).encode()}


def _benched(found: Contents) -> Contents:
    """Of a measurement it counts that JSON and table are of the same one."""
    from ss_runtime.bench.report import markdown

    if "out.json" not in found:
        return found
    table = markdown(json.loads(found["out.json"])).encode()
    return {**found, "out.json": b"whole", "out.md": b"its table" if found.get("out.md") == table else b""}


@dataclass(frozen=True)
class Race:
    """Two commands in one folder, prepared as for the first. view: what of the outcome is compared;
    reads: the first one also stands still before it opens a file to read it; slow: too many operations
    to try all of them."""

    name: str
    commands: tuple[Command, Command]
    view: Callable[[Contents], Contents] = _all
    reads: bool = False
    slow: bool = False

    @property
    def result(self) -> str:
        return self.commands[0].result

    def bodies(self, inputs: Path) -> list[Callable[[], int | None]]:
        return [command.body(inputs) for command in self.commands]

    def prepare(self, inputs: Path, folder: Path) -> Path:
        return self.commands[0].prepare(inputs, folder)


def _other(command: Command, *changes: tuple[str, str]) -> Command:
    """The command with other words."""
    words = command.arguments
    for old, new in changes:
        words = tuple(new if word == old else word for word in words)
    return replace(command, arguments=words)


def _races() -> tuple[Race, ...]:
    new, over, into = (COMMANDS[n] for n in ("convert-mlx", "convert-over-mlx", "into-mlx"))
    core, forced = COMMANDS["into"], over
    bias, adapter, cache = (COMMANDS[name] for name in ("bigram-bias", "adapter", "prompt-cache"))
    tune = replace(COMMANDS["tune"], before=(("pair_bundle", "bundle"),))
    tunes = [replace(tune, arguments=(*TUNE, "--adapter", app)) for app in ("one", "two")]
    reader = replace(cache, before=(("mlx_bundle", "out"),), result="out")
    reader = replace(reader, arguments=("--bundle", "out", *GENERATE[2:-2], "--json"))
    traced = (("golden_bundle", "out"),)
    check = ("out", "--backend", "mlx", "--dtype", "float32")
    validate = Command("validate", "ss_runtime.commands.validate", check, "out", traced)
    base = replace(COMMANDS["base"], arguments=BASE)
    return (
        Race("new-same", (new, new)),
        Race("new-other", (new, _other(new, ("one", "two")))),
        Race("over-other", (forced, _other(forced, ("two", "one")))),
        Race("into-two", (into, _other(into, ("two", "three")))),
        Race("into-two-coreml", (core, _other(core, ("two", "three"))), slow=True),
        Race("into-and-over", (into, _other(forced, ("two", "one")))),
        Race("adapter", (adapter, (replace(adapter, arguments=(*adapter.arguments, "--seed", "1"))))),
        Race("adapter-same", (adapter, adapter)),
        Race("lora", (COMMANDS["lora"], COMMANDS["lora"])),
        Race("base", (base, base)),
        Race("distill", (COMMANDS["distill"], COMMANDS["distill"])),
        Race("replay", (COMMANDS["replay"], COMMANDS["replay"])),
        Race("bigram-bias", (bias, replace(bias, arguments=(*bias.arguments, "--seed", "1")))),
        Race("prompt-cache", (cache, _other(cache, ("SELECT a", "x")))),
        Race("tune-two", (tunes[0], tunes[1]), _tuned),
        Race("bench", (COMMANDS["bench"], COMMANDS["bench"]), _benched),
        Race("generate-while-converting", (reader, forced), reads=True),
        Race("validate-while-converting", (validate, forced), reads=True),
    )  # fmt: skip


RACES = {race.name: race for race in _races()}
