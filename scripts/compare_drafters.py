"""Train and measure the rows of the comparison in models/README.md: every drafter at one small budget.

python scripts/compare_drafters.py --base models/base/ss-demo-base --data DATA --own OWN --output runs/rows

DATA holds `<app>/train.jsonl.gz` and `<app>/test.jsonl.gz`, OWN the base's own continuations
(`ss-train distill`) as `own_<app>.jsonl`. Every run of an application sees the same number of texts once
(`long`: five times), in the same order; what differs is named by its row. A finished run or measurement is
not repeated, so the script goes on after an interruption; `--phase measure` in a second process measures
what the first has trained. Results: `<output>/<app>/<row>.json`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ss_device.command_line import add_device
from ss_device.json_lines import read_json_lines

TREES = ("best-first:32", "chain:5", "best-first+lookup:32")
PAPER_TREES = (*TREES, "k-ary:121")
DEEP_TREES = (*TREES, "best-first:32:4", "chain:9")


@dataclass(frozen=True)
class Budget:
    """How much one run of an application reads: texts, and which rows of the data count."""

    texts: int
    longest: int = 320
    longest_test_prompt: int | None = None


BUDGETS = {
    "sqlctx": Budget(2000),
    "e2e_nlg": Budget(3000),
    "dialogsum": Budget(900, longest=448, longest_test_prompt=500),
}


@dataclass(frozen=True)
class Row:
    """One drafter: the settings that make it, its text (`gold`: the data's, `own`: the base's), epochs."""

    name: str
    settings: str
    changes: tuple[str, ...] = ()
    text: str = "gold"
    trees: tuple[str, ...] = TREES
    epochs: int = 1

    @property
    def has_bias(self) -> bool:
        return self.settings == "plus" or "bigram_rank=32" in self.changes

    @property
    def shared(self) -> bool:
        return self.settings.startswith("shared")


ROWS = [
    Row("lora", "lora"),
    Row("shared", "shared"),
    Row("shared-v2", "shared-v2"),
    Row("paper", "paper", trees=PAPER_TREES),
    Row("bigram-bias", "paper", ("bigram_rank=32",)),
    Row("stream-lora", "plus"),
    Row("self-distilled", "plus", text="own"),
    Row("self-distilled-8", "plus", ("num_streams=8",), "own", DEEP_TREES),
]
ABLATIONS = [
    *(Row(f"shared-layers-{n}", "shared", (f"num_msa_layers={n}",)) for n in (2, 6, 8)),
    *(Row(f"layers-{n}", "plus", (f"num_msa_layers={n}",), "own") for n in (2, 6, 8)),
]
ABLATION_APP = "e2e_nlg"
# v1 App. B turns the values of stream n by ε·n with ε ≤ π / 2N, N = longest text + streams: here 1024 + 4.
# Streams stand at their main row's position, so nothing but the rotation tells them apart.
ROTATION = "value_rotation=0.001528"
BEYOND = "value_rotation=0.39"
SAME = "stream_position=same"
ROTATIONS = [
    Row("same", "plus", (SAME,), "own"),
    Row("same-rotated", "plus", (SAME, ROTATION), "own"),
    Row("same-rotated-beyond", "plus", (SAME, BEYOND), "own"),
    Row("paper-same", "paper", (SAME,), "own"),
    Row("paper-same-rotated", "paper", (SAME, ROTATION), "own"),
    Row("paper-same-rotated-beyond", "paper", (SAME, BEYOND), "own"),
    Row("paper-same-long", "paper", (SAME,), "own", epochs=5),
    Row("paper-same-long-rotated", "paper", (SAME, ROTATION), "own", epochs=5),
    Row("paper-same-long-rotated-beyond", "paper", (SAME, BEYOND), "own", epochs=5),
    Row("shared-same", "shared", (SAME,)),
    Row("shared-same-rotated", "shared", (SAME, ROTATION)),
    Row("shared-same-rotated-beyond", "shared", (SAME, BEYOND)),
]
# Top-k trees of four streams: k, nodes, and how many the early exit keeps (all, then fewer).
PRUNING = [(1, 5, (5,)), (2, 31, (31, 16, 8)), (3, 121, (121, 32, 16))]
PRUNING_PROMPTS = 20


def main() -> None:
    arguments = parse()
    runs = [(app, row) for app in BUDGETS for row in ROWS] + [(ABLATION_APP, row) for row in ABLATIONS]
    runs += [(app, row) for row in ROTATIONS for app in BUDGETS]
    runs = [(a, r) for a, r in runs if not arguments.only or f"{a}/{r.name}" in arguments.only]
    for app, row in runs:
        if arguments.phase in ("train", "all"):
            train(app, row, arguments)
        if arguments.phase in ("measure", "all"):
            wait_for(arguments.output / app / row.name, arguments.phase == "measure")
            measure(app, row, arguments)
    if arguments.phase != "train" and (not arguments.only or "pruning" in arguments.only):
        measure_pruning(arguments)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--own", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rows", type=Path, help="<app>.jsonl here replaces the train split")
    parser.add_argument("--phase", choices=("train", "measure", "all"), default="all")
    parser.add_argument("--precision", default="fp32", help="fp32 or bf16, of adapters")
    parser.add_argument("--only", action="append", metavar="APP/ROW|pruning")
    add_device(parser)
    return parser.parse_args()


def train(app: str, row: Row, arguments: argparse.Namespace) -> None:
    output = arguments.output / app / row.name
    if output.exists():
        return
    budget, data = BUDGETS[app], text_of(app, row, arguments)
    common = ["--base", arguments.base, "--data", data, "--limit", budget.texts, "--output", output]
    common += ["--epochs", row.epochs, "--tokens-per-batch", 1024, "--max-length", budget.longest]
    common += on_device(arguments)
    if row.name == "lora":
        ss_train("lora", app, *common, "--learning-rate", 1e-3)
        return
    rate = 1e-3 if row.shared else 2e-3
    more = ["--settings", row.settings, "--learning-rate", rate, "--precision", arguments.precision]
    more += [word for change in row.changes for word in ("--set", change)]
    if row.has_bias:
        more += ["--bigram-bias", bigram_bias(app, row.text, data, arguments)]
    ss_train("adapter", app, *common, *more, "--valid", 100, "--evaluate-every", 0)


def text_of(app: str, row: Row, arguments: argparse.Namespace) -> Path:
    if row.text == "own":
        return arguments.own / f"own_{app}.jsonl"
    chosen = arguments.rows / f"{app}.jsonl" if arguments.rows else None
    return chosen if chosen and chosen.exists() else arguments.data / app / "train.jsonl.gz"


def bigram_bias(app: str, text: str, data: Path, arguments: argparse.Namespace) -> Path:
    """The bigrams of the budget's texts, trained once per application and text."""
    path = arguments.output / app / f"bias-{text}.safetensors"
    if not path.exists():
        drawn = arguments.output / app / f"bias-{text}.jsonl"
        take(data, drawn, BUDGETS[app].texts)
        words = [f"{app}={drawn}", "--base", arguments.base, "--output", path, *on_device(arguments)]
        ss_train("bigram-bias", *words)
    return path


def take(data: Path, output: Path, count: int) -> None:
    rows = list(read_json_lines(data))
    step = max(1, len(rows) // count)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(json.dumps(row) + "\n" for row in rows[::step][:count]))


def measure(app: str, row: Row, arguments: argparse.Namespace) -> None:
    folder = arguments.output / app
    result = folder / f"{row.name}.json"
    if result.exists():
        return
    budget, common = BUDGETS[app], ["--base", arguments.base, "--limit", 200, "--json"]
    common += ["--data", arguments.data / app / "test.jsonl.gz", *on_device(arguments)]
    longest = ["--longest-prompt", budget.longest_test_prompt] if budget.longest_test_prompt else []
    if row.name == "lora":
        text = ss_train("score", app, *common, *longest, "--lora", folder / row.name)
    elif row.settings == "shared-v2":
        text = ss_train("evaluate", folder / row.name, *common, *longest, "--nodes", 32)
    else:
        own = folder / (f"test-{row.name}.jsonl" if row.shared else "test-base.jsonl")
        trees = [word for tree in row.trees for word in ("--tree", tree)]
        text = ss_train("replay", folder / row.name, *common, *longest, "--continuations", own, *trees)
    result.write_text(text)


def measure_pruning(arguments: argparse.Namespace) -> None:
    """Top-k trees with and without pruning by the early exit, decoded step by step."""
    folder = arguments.output / ABLATION_APP
    for k, nodes, kept in PRUNING:
        for keep in kept:
            result = folder / f"pruning-{k}-{keep}.json"
            if result.exists():
                continue
            words = ["--base", arguments.base, "--data", arguments.data / ABLATION_APP / "test.jsonl.gz"]
            words += [
                *on_device(arguments),
                "--limit",
                PRUNING_PROMPTS,
                "--shape",
                "k-ary",
                "--tree-top-k",
                k,
                "--nodes",
                nodes,
            ]
            adapter = folder / "self-distilled"
            result.write_text(ss_train("evaluate", adapter, *words, "--keep", keep, "--json"))


def wait_for(folder: Path, other_process_trains: bool) -> None:
    while other_process_trains and not folder.exists():
        time.sleep(10)


def on_device(arguments: argparse.Namespace) -> list[str]:
    return ["--device", arguments.device] if arguments.device else []


def ss_train(*words) -> str:
    """Standard output of one command; its progress goes to this process's stderr. Ends on an error."""
    command = [sys.executable, "-m", "ss_device.training.command", *map(str, words)]
    print(time.strftime("%H:%M:%S"), *command[3:6], flush=True, file=sys.stderr)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout


if __name__ == "__main__":
    main()
