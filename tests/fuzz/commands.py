"""The command lines that cases run, with `work` of the inputs as working directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from tests.fuzz.inputs import ADAPTER_RUN, BASE_RUN, LORA_RUN, SIZES

PROGRAMS = {
    "ss-convert": "ss_convert.command",
    "ss-generate": "ss_runtime.commands.generate",
    "ss-validate": "ss_runtime.commands.validate",
    "ss-bench": "ss_runtime.commands.bench",
    "ss-train": "ss_device.training.command",
    "executor": "ss_executor.cli",
    "server": "tests.fuzz.served",
}


@dataclass(frozen=True)
class Command:
    """One command line. weight: how often it is drawn, less for slow ones.

    writes: what it may change, beside the folder for temporary files. speaks: its output holds what a
    random model says, control characters among it. verifies: beginnings of the paths that it checks whole.
    """

    program: str
    arguments: tuple[str, ...]
    weight: float = 1.0
    writes: tuple[str, ...] = ("out",)
    speaks: bool = False
    verifies: tuple[str, ...] = ()
    stdin: str = ""

    def main(self) -> Callable[[list[str]], int]:
        return import_module(PROGRAMS[self.program]).main

    @property
    def is_json(self) -> bool:
        return "--json" in self.arguments

    def line(self) -> str:
        """The command as a user would type it."""
        shown = [a if a and not set(a) & set(' {"') else f"'{a}'" for a in self.arguments]
        return " ".join((self.program, *shown))


def _convert(adapter: str, *more: str, base: str = "models/base/tiny-base", **settings) -> Command:
    arguments = ("--adapter", adapter, "--models", "models", *more, "--json")
    return Command("ss-convert", arguments, verifies=(base,), **settings)


def _generate(*more: str, adapter: str = "tiny", **settings) -> Command:
    shared = ("--bundle", "bundle", "--adapter", adapter, "--max-tokens", "3", "--dtype", "float32")
    return Command("ss-generate", (*shared, *more), speaks=True, **settings)


def _train(*arguments: str, weight: float = 1.0, **settings) -> Command:
    return Command("ss-train", arguments, weight, **{"writes": ("out", "runs"), **settings})


def _elsewhere(run: tuple[str, ...]) -> tuple[str, ...]:
    """A training run that starts anew, in the folder for outputs."""
    return tuple(a.replace("runs/", "out/") for a in run)


PROMPT = ("--prompt", "SELECT a", "--json")
BASE = ("--base", "models/base/tiny-base")
ROWS = ("--data", "data/rows.jsonl")
NEW = ("--output", "out/new", "--no-golden", *SIZES)
FEW_PROMPTS = (
    "bundle", "--adapter", "tiny", "--input", "data/prompts.jsonl", "--limit", "1", "--max-tokens", "2",
)  # fmt: skip

COMMANDS = {
    "convert": _convert("tiny", *NEW, "--target", "mlx"),
    "convert shared": _convert("shared", *NEW, "--target", "mlx"),
    "convert sharded": _convert("sharded", *NEW, "--target", "mlx", base="models/base/sharded-base"),
    "convert packed": Command(
        "ss-convert",
        (
            "--adapter",
            "wide",
            "--base",
            "models/base/packed-base",
            "--models",
            "models",
            "--output",
            "out/new",
            "--target",
            "mlx",
            "--no-golden",
            "--json",
        ),
    ),
    "convert over": _convert(
        "tiny", "--output", "out/earlier", "--no-golden", *SIZES, "--target", "mlx", "--force"
    ),
    "convert golden": _convert("tiny", "--output", "out/new", *SIZES, "--target", "mlx", weight=0.6),
    "convert coreml": _convert("tiny", *NEW, "--target", "coreml", weight=0.4),
    "convert into": _convert("second", "--into", "out/earlier", "--no-golden"),
    "convert into all": _convert(
        "second", "--into", "bundle", "--no-golden", writes=("bundle", ".bundle."), weight=0.3
    ),
    "sizes": Command(
        "ss-convert",
        ("sizes", "--adapter", "tiny", "--models", "models", "--weights", "fp16", "--json"),
        0.2,
    ),
    "audit": Command("ss-convert", ("audit", "bundle", "--json")),
    "audit package": Command("ss-convert", ("audit", "bundle/coreml/tiny-base.mlpackage", "--json")),
    "executor": Command("executor", ("bundle/coreml/tiny-base.mlpackage", "--json")),
    "executor text": Command("executor", ("bundle/coreml/tiny-base.mlpackage",)),
    "generate": _generate(*PROMPT, "--backend", "mlx"),
    "generate shared": _generate(*PROMPT, "--backend", "mlx", adapter="shared"),
    "generate executor": _generate(*PROMPT, "--backend", "executor", weight=0.7),
    "generate reference": _generate(*PROMPT, "--backend", "reference", weight=0.5),
    "generate mlxfn": Command(
        "ss-generate",
        ("--bundle", "bundle", "--adapter", "tiny", "--max-tokens", "3", *PROMPT, "--backend", "mlxfn"),
        speaks=True,
    ),
    "generate coreai": Command(
        "ss-generate",
        ("--bundle", "bundle", "--adapter", "tiny", "--max-tokens", "3", *PROMPT, "--backend", "coreai"),
        speaks=True,
    ),
    "generate packed": Command(
        "ss-generate",
        ("--bundle", "packed", "--max-tokens", "3", "--dtype", "float32", *PROMPT),
        speaks=True,
    ),
    "generate rows": _generate("--input", "data/prompts.jsonl", "--limit", "2", "--json"),
    "generate chat": _generate("--chat", stdin="hello\nagain\n"),
    "generate cache": _generate(*PROMPT, "--prompt-cache", "cache/text.safetensors", writes=("cache",)),
    "generate base": Command(
        "ss-generate",
        ("--bundle", "bundle", "--no-adapter", "--max-tokens", "3", "--dtype", "float32", *PROMPT),
        speaks=True,
    ),
    "validate": Command(
        "ss-validate",
        ("bundle", "--adapter", "tiny", "--backend", "mlx", "--limit", "1", "--json"),
        verifies=("bundle",),
    ),
    "validate executor": Command(
        "ss-validate",
        ("bundle", "--adapter", "tiny", "--backend", "executor", "--limit", "1", "--json"),
        0.5,
        verifies=("bundle",),
    ),
    "validate traces": Command(
        "ss-validate",
        ("bundle", "--adapter", "tiny", "--backend", "mlx", "--limit", "1", "--traces", "traces", "--json"),
        verifies=("bundle",),
    ),
    "validate record": Command(
        "ss-validate",
        (
            "bundle",
            "--adapter",
            "tiny",
            "--limit",
            "1",
            "--record",
            "out/traces",
            "--prompts",
            "data/prompts.jsonl",
        ),
        0.5,
        verifies=("bundle",),
    ),
    "validate mlxfn": Command(
        "ss-validate",
        ("bundle", "--adapter", "tiny", "--backend", "mlxfn", "--limit", "1", "--json"),
        verifies=("bundle",),
    ),
    "bench run": Command(
        "ss-bench",
        (
            "run",
            *FEW_PROMPTS,
            "--methods",
            "plain,ss-tuned",
            "--output",
            "out/result.json",
            "--json",
        ),
    ),
    "bench drafts": Command(
        "ss-bench",
        (
            "run",
            *FEW_PROMPTS,
            "--methods",
            "plain,mlx-lm-draft,hf-assisted",
            "--base",
            "models/base/tiny-base",
            "--draft",
            "models/base/sharded-base",
            "--dtype",
            "float32",
            "--json",
        ),
        0.3,
    ),
    "bench tune": Command(
        "ss-bench",
        (
            "tune",
            *FEW_PROMPTS,
            "--rounds",
            "1",
            "--json",
        ),
        0.5,
        writes=("bundle/tuning.json", "bundle/.tuning.json.partial"),
    ),
    "bench tune by ranks": Command(
        "ss-bench",
        ("tune", "bundle", "--adapter", "tiny", "--rounds", "1", "--json"),
        0.5,
        writes=("bundle/tuning.json", "bundle/.tuning.json.partial"),
    ),
    "bench compare": Command(
        "ss-bench", ("compare", "results/before.json", "results/after.json", "--json")
    ),
    "bench compare text": Command("ss-bench", ("compare", "results/before.json", "results/after.json")),
    "bench plot": Command(
        "ss-bench",
        (
            "plot",
            "results/before.json",
            "results/after.json",
            "--tuning",
            "bundle/tuning.json",
            "--output",
            "out/plot.svg",
        ),
        0.2,
    ),
    "train adapter": _train(*_elsewhere(ADAPTER_RUN), "--json", weight=0.6),
    "train adapter from": _train(*_elsewhere(ADAPTER_RUN), "--start", "runs/adapter", "--json", weight=0.6),
    "train adapter with bias": _train(
        *_elsewhere(ADAPTER_RUN),
        "--set",
        "bigram_rank=2",
        "--bigram-bias",
        "cache/bias.safetensors",
        "--json",
        weight=0.6,
    ),
    "train adapter resumed": _train(*ADAPTER_RUN, "--resume", "--json", weight=0.8),
    "train adapter talk": _train(
        *(a.replace("pair", "talk").replace("rows.jsonl", "talk.jsonl") for a in _elsewhere(ADAPTER_RUN)),
        "--json",
        weight=0.6,
    ),
    "train adapter gzip": _train(
        *(a.replace("rows.jsonl", "rows.jsonl.gz") for a in _elsewhere(ADAPTER_RUN)), "--json", weight=0.6
    ),
    "train lora": _train(*_elsewhere(LORA_RUN), "--json", weight=0.5),
    "train lora resumed": _train(*LORA_RUN, "--resume", "--json", weight=0.5),
    "train base": _train(*_elsewhere(BASE_RUN), "--json", weight=0.3),
    "train base resumed": _train(*BASE_RUN, "--resume", "--json", weight=0.4),
    "train base from": _train(
        *_elsewhere(BASE_RUN)[:-2], "--start", "models/base/tiny-base", "--json", weight=0.3
    ),
    "train distill": _train(
        "distill",
        "pair",
        *BASE,
        *ROWS,
        "--output",
        "out/own.jsonl",
        "--max-tokens",
        "2",
        "--limit",
        "2",
        "--json",
        weight=0.6,
    ),
    "train distill resumed": _train(
        "distill",
        "pair",
        *BASE,
        *ROWS,
        "--output",
        "data/own.jsonl",
        "--max-tokens",
        "2",
        "--batch-size",
        "4",
        "--json",
        weight=0.6,
        writes=("data/own.jsonl",),
    ),
    "train bigram bias": _train(
        "bigram-bias",
        "pair=data/own.jsonl",
        *BASE,
        "--output",
        "out/bias.safetensors",
        "--rank",
        "2",
        "--epochs",
        "1",
        "--json",
        weight=0.6,
    ),
    "train replay": _train(
        "replay",
        "runs/adapter",
        *BASE,
        *ROWS,
        "--continuations",
        "data/own.jsonl",
        "--tree",
        "best-first:3",
        "--limit",
        "2",
        "--max-tokens",
        "2",
        "--json",
        weight=0.6,
        writes=("data/own.jsonl",),
    ),
    "train evaluate": _train(
        "evaluate",
        "runs/adapter",
        *BASE,
        *ROWS,
        "--limit",
        "1",
        "--max-tokens",
        "2",
        "--nodes",
        "3",
        "--json",
        weight=0.3,
    ),
    "train score": _train(
        "score",
        "pair",
        *BASE,
        *ROWS,
        "--lora",
        "runs/lora",
        "--limit",
        "1",
        "--max-tokens",
        "2",
        "--json",
        weight=0.3,
    ),
    "serve chat": Command("server", ("chat", "data/chat.json"), speaks=True),
    "serve text": Command("server", ("text", "data/text.json"), speaks=True),
}
