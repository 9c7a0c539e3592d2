"""The commands under test: what stands there before, what is run, what is run again after a kill."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.faults.inputs import APP, SETTINGS, SIZES


def _nothing(path: Path) -> None:
    """For results that have no reader of their own."""


def _read_bundle(path: Path) -> None:
    from ss_device.bundle import open_bundle

    open_bundle(path, verify=True)


def _read_adapter(path: Path) -> None:
    from ss_device.adapter import load_adapter

    load_adapter(path)


def _read_base(path: Path) -> None:
    from tokenizers import Tokenizer

    from ss_device.base_model import open_base

    open_base(path).weights()
    Tokenizer.from_file(str(path / "tokenizer.json"))


def _read_tuning(path: Path) -> None:
    from ss_device.bundle import open_bundle
    from ss_runtime.tuning import read_tuning

    read_tuning(open_bundle(path.parent), "one", "float32")


def _read_traces(path: Path) -> None:
    from ss_device.trace import load_traces, trace_record

    assert load_traces(path / "one") and trace_record(path / "one")


@dataclass(frozen=True)
class Command:
    """One command line. `{inputs}` in arguments stands for the folder of `make_inputs`.

    result: what it makes, in the folder it runs in; before: (input, name there) pairs that are copied
    first; again: what is added to the arguments of a rerun; read: raises for a result that is not whole;
    grows: the result is a file to which lines are added, so it may be there in part; reproducible: two
    runs give the same bytes, apart from times; renews: the finished command, run again, makes its result
    anew, and not quite the same.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    result: str
    before: tuple[tuple[str, str], ...] = ()
    again: tuple[str, ...] = ()
    read: Callable[[Path], None] = _nothing
    grows: bool = False
    reproducible: bool = True
    renews: bool = False

    def body(self, inputs: Path, rerun: bool = False) -> Callable[[], int | None]:
        """What a child process runs."""
        words = (*self.arguments, *(self.again if rerun else ()))
        argv = [word.replace("{inputs}", str(inputs)) for word in words]
        return lambda: importlib.import_module(self.module).main(argv)

    def prepare(self, inputs: Path, folder: Path) -> Path:
        """An empty `folder` with what stands there before the command runs."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for source, name in self.before:
            source, target = inputs / source, folder / name
            shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)
        return folder


CONVERT = ("--models", "{inputs}/models", *SIZES)
TRAIN = ("--base", "{inputs}/models/base/tiny-base")
ADAPTER = (
    "adapter", APP, *TRAIN, "--data", "{inputs}/own.jsonl", "--settings", SETTINGS, "--output", "out",
    "--epochs", "2", "--tokens-per-batch", "256", "--checkpoint-minutes", "0", "--evaluate-every", "1",
    "--patience", "9", "--golden-prompts", "{inputs}/prompts.jsonl",
)  # fmt: skip
BASE = (
    "base", "{inputs}/recipe.toml", "--data", "{inputs}/data", "--output", "out",
    "--checkpoint-minutes", "0",
)  # fmt: skip
GENERATE = (
    "--bundle", "{inputs}/mlx_bundle", "--prompt", "SELECT a", "--max-tokens", "4", "--backend", "mlx",
    "--prompt-cache", "out.safetensors",
)  # fmt: skip
RECORD = ("{inputs}/mlx_bundle", "--record", "out", "--prompts", "{inputs}/prompts.jsonl")
TUNE = ("tune", "bundle", "--input", "{inputs}/prompts.jsonl", "--max-tokens", "4", "--rounds", "1",
        "--dtype", "float32")  # fmt: skip


def _convert(name: str, *more: str, before: tuple[tuple[str, str], ...] = ()) -> Command:
    result = more[more.index("--into") + 1] if "--into" in more else "out"
    output = () if "--into" in more else ("--output", result)
    sizes = CONVERT[:2] if "--into" in more else CONVERT
    # Adding a second time replaces the adapter by itself: what it was added to is another bundle then.
    return Command(
        name, "ss_convert.command", (*sizes, *output, *more), result, before, read=_read_bundle,
        renews="--into" in more,
    )  # fmt: skip


def _train(name: str, arguments: tuple[str, ...], result: str = "out", **settings) -> Command:
    return Command(name, "ss_device.training.command", arguments, result, **settings)


def _all() -> tuple[Command, ...]:
    earlier, mlx = (("bundle", "out"),), (("mlx_bundle", "out"),)
    return (
        _convert("convert-mlx", "--adapter", "one", "--target", "mlx", "--no-golden"),
        _convert("convert-over-mlx", "--adapter", "two", "--target", "mlx", "--no-golden", "--force",
                 before=mlx),
        _convert("into-mlx", "--adapter", "two", "--into", "out", "--no-golden", before=mlx),
        _convert("convert", "--adapter", "one", "--target", "all", "--golden-prompts",
                 "{inputs}/prompts.jsonl"),
        _convert("convert-over", "--adapter", "two", "--no-golden", "--force", before=earlier),
        _convert("into", "--adapter", "two", "--into", "out", "--no-golden", before=earlier),
        _train("adapter", ADAPTER, read=_read_adapter, again=("--resume",)),
        _train("adapter-over", (*ADAPTER, "--seed", "1", "--force"), read=_read_adapter,
               before=(("adapter", "out"), ("adapter.run", "out.run"))),
        _train("lora", ("lora", APP, *TRAIN, "--data", "{inputs}/own.jsonl", "--output", "out", "--rank",
                        "2", "--epochs", "2", "--tokens-per-batch", "256"), again=("--resume",)),
        _train("base", BASE, read=_read_base, again=("--resume",)),
        _train("base-further", (*BASE, "--resume", "--steps", "3"), read=_read_base,
               before=(("base", "out"), ("base.run", "out.run"))),
        _train("distill", ("distill", APP, *TRAIN, "--data", "{inputs}/rows.jsonl", "--output",
                           "out.jsonl", "--max-tokens", "4", "--batch-size", "4"), "out.jsonl", grows=True),
        _train("bigram-bias", ("bigram-bias", f"{APP}={{inputs}}/own.jsonl", *TRAIN, "--rank", "2",
                               "--epochs", "1", "--output", "out.safetensors"), "out.safetensors"),
        _train("replay", ("replay", "{inputs}/adapter", *TRAIN, "--data", "{inputs}/rows.jsonl",
                          "--continuations", "out.jsonl", "--limit", "3", "--max-tokens", "4"),
               "out.jsonl", grows=True),
        Command("record", "ss_runtime.commands.validate", RECORD, "out", read=_read_traces),
        Command("record-over", "ss_runtime.commands.validate", (*RECORD, "--force"), "out",
                (("traces", "out"),), read=_read_traces),
        Command("prompt-cache", "ss_runtime.commands.generate", GENERATE, "out.safetensors"),
        Command("tune", "ss_runtime.commands.bench", TUNE, "bundle/tuning.json",
                (("mlx_bundle", "bundle"),), read=_read_tuning, reproducible=False),
        Command("bench", "ss_runtime.commands.bench",
                ("run", "{inputs}/mlx_bundle", "--input", "{inputs}/prompts.jsonl", "--max-tokens", "4",
                 "--methods", "plain,ss", "--output", "out.json"), "out.json", reproducible=False),
    )  # fmt: skip


COMMANDS = {command.name: command for command in _all()}
