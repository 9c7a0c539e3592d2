"""What compression costs: metric and tokens per call of applications for every weight format.

    python -m scripts.compressed_quality build/quality --data DATA --adapter sqlctx --adapter e2e_nlg

For every `--weights` one bundle of all adapters is converted. Its package is held to the reference by
`ss-validate` on the executor (the reference decodes with the weights read back from the package), in
float32 and float16; then the reference with those very weights answers `--limit` test prompts
(`DATA/<app>/test.jsonl.gz`), which gives the metric and, replayed over its own text, tokens per call. What
is finished lies in the folder and is not done again. Prints Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path

from ss_convert.command import main as ss_convert
from ss_convert.graph.weight_format import WEIGHT_FORMATS
from ss_convert.stored_weights import stored_weights
from ss_device.base_model import models_folder, open_base
from ss_device.bundle import open_bundle
from ss_device.command_line import add_device
from ss_device.draft_choice import DraftChoice
from ss_device.evaluation.replay_report import replay_adapter
from ss_device.evaluation.settings import ReplaySettings
from ss_runtime.commands.validate import main as ss_validate

TREES = ("best-first:32",)
FIGURES = {"exact_match": "exact match", "rouge1": "ROUGE-1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where bundles and results go")
    parser.add_argument("--data", type=Path, required=True, help="folder with <app>/test.jsonl.gz")
    parser.add_argument("--adapter", action="append", required=True, help="name under models/adapters")
    parser.add_argument("--weights", action="append", choices=WEIGHT_FORMATS, help="default: all")
    parser.add_argument("--limit", type=int, default=200, help="prompts per application")
    parser.add_argument("--longest-prompt", type=int, default=500, help="longer prompts are left out")
    add_device(parser)
    arguments = parser.parse_args()
    weight_formats = arguments.weights or list(WEIGHT_FORMATS)
    for weight_format in weight_formats:
        convert(weight_format, arguments)
        for app in arguments.adapter:
            measure(weight_format, app, arguments)
    print_tables(weight_formats, arguments)
    return 0


def result_file(folder: Path, weight_format: str, what: str) -> Path:
    return folder / weight_format / f"{what}.json"


def write_json(path: Path, content: dict) -> None:
    """In one go: a file that is there is whole."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content) + "\n")
    partial.replace(path)


def convert(weight_format: str, arguments: argparse.Namespace) -> None:
    """The bundle of one weight format and what `ss-validate` says of it; exits where either fails."""
    bundle = arguments.folder / weight_format / "bundle"
    names = [part for name in arguments.adapter for part in ("--adapter", name)]
    if status := ss_convert([*names, "--weights", weight_format, "--output", str(bundle)]):
        sys.exit(status)
    done = result_file(arguments.folder, weight_format, "validated")
    if done.is_file():
        return
    printed = io.StringIO()
    back_ends = [part for d in ("float32", "float16") for part in ("--backend", f"executor:{d}")]
    with contextlib.redirect_stdout(printed):
        # Exit code 1 means differences: they are in the table.
        if ss_validate([str(bundle), *back_ends, "--json"]) == 2:
            sys.exit(2)
    write_json(done, json.loads(printed.getvalue()))


def measure(weight_format: str, app: str, arguments: argparse.Namespace) -> None:
    """Metric and tokens per call of one application with the weights that the package holds."""
    done = result_file(arguments.folder, weight_format, app)
    if done.is_file() and json.loads(done.read_text())["limit"] == arguments.limit:
        return
    print(f"{weight_format} {app}", file=sys.stderr)
    bundle, models = open_bundle(arguments.folder / weight_format / "bundle"), models_folder()
    base = open_base(models / "base" / bundle.manifest.base.name)
    functions = bundle.adapter(app).coreml
    packages = [bundle.path / name for name in functions.packages]
    trees = tuple(map(DraftChoice.parse, TREES))
    found = replay_adapter(
        models / "adapters" / app,
        base.path,
        arguments.data / app / "test.jsonl.gz",
        arguments.folder / weight_format / f"own_{app}.jsonl",
        ReplaySettings(arguments.limit, longest_prompt=arguments.longest_prompt, trees=trees),
        weights=stored_weights(packages, functions.step, base.weights(), base.architecture),
        device=arguments.device,
    )
    write_json(done, {"limit": arguments.limit, **found})


def print_tables(weight_formats: list[str], arguments: argparse.Namespace) -> None:
    """Markdown: metric and tokens per call by weight format, then the executor against the reference."""
    apps = arguments.adapter
    print("| weights | " + " | ".join(f"{app}: metric | {app}: tokens per call" for app in apps) + " |")
    print("|---" * (1 + 2 * len(apps)) + "|")
    for weight_format in weight_formats:
        cells = [
            quality(json.loads(result_file(arguments.folder, weight_format, app).read_text()))
            for app in apps
        ]
        print(f"| {weight_format} | " + " | ".join(cells) + " |")
    columns = ["weights", "application", "dtype", "prompts exact"]
    columns += ["nodes", "max. Δ logit", "near ties", "other"]
    print("\n| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for weight_format in weight_formats:
        for row in json.loads(result_file(arguments.folder, weight_format, "validated").read_text())[
            "results"
        ]:
            print("| " + " | ".join([weight_format, *agreement(row)]) + " |")


def agreement(row: dict) -> list[str]:
    """Cells of one replay of golden traces on the executor."""
    ties = sum(d["near_tie"] for d in row["differences"])
    return [
        row["adapter"],
        row["dtype"],
        f"{row['token_exact']} of {row['prompts']}",
        str(row["nodes"]),
        f"{row['max_logit_difference']:.2g}",
        str(ties),
        str(len(row["differences"]) - ties),
    ]


def quality(found: dict) -> str:
    """Two cells: the metric with its 95 % interval and prompts, and tokens per call."""
    figure = next(name for name in FIGURES if name in found)
    low, high = found[f"{figure}_interval"]
    trees = [found["trees"][tree] for tree in TREES]
    per_call = " / ".join(f"{tree['tokens_per_call']:.2f}" for tree in trees)
    metric = f"{FIGURES[figure]} {found[figure]:.3f} ({low:.3f}–{high:.3f})"
    return f"{metric}, {trees[0]['prompts']} prompts | {per_call}"


if __name__ == "__main__":
    sys.exit(main())
