"""`ss-convert`: base and adapter folders to a bundle for Core ML and MLX."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from ss_convert.conversion import NUM_STAGES, Outcome, convert, existing_bundle
from ss_convert.planning import TARGETS, Plan, Request, plan_conversion
from ss_device.bundle import Bundle
from ss_device.command_line import (
    CommandParser,
    console,
    positive,
    print_json,
    progress,
    run_command,
    size_text,
)

PRUNE_OVER = ("draft", "vocabulary")


def main(argv: list[str] | None = None) -> int:
    """Entry point of `ss-convert`; returns the exit code."""
    return run_command(_parser(), convert_command, argv)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="ss-convert",
        description="Convert a base model and an adapter to one bundle: MLX weights, a Core ML package "
        "and the reference's golden traces.",
        example="ss-convert --adapter sqlctx",
    )
    add = parser.add_argument
    add(
        "--adapter",
        required=True,
        metavar="NAME|PATH",
        help="adapter folder, or its name under models/adapters",
    )
    add(
        "--base",
        type=Path,
        metavar="PATH",
        help="base model folder (default: the adapter's, under models/base)",
    )
    add(
        "--models",
        type=Path,
        metavar="DIR",
        help="folder with base/ and adapters/ (default: $SS_MODELS or models)",
    )
    add("--output", type=Path, metavar="DIR", help="bundle folder (default: build/<app>)")
    add("--target", choices=(*TARGETS, "both"), default="both")
    add("--nodes", type=positive, default=32, metavar="N", help="tree nodes per step (default 32)")
    add("--keep", type=positive, metavar="K", help="nodes left after early-exit pruning (default: all)")
    add("--context", type=positive, metavar="N", help="tokens the Core ML cache holds (default 512)")
    add("--chunk", type=positive, metavar="N", help="prompt tokens per Core ML prefill call (default 64)")
    add(
        "--prune-over",
        choices=PRUNE_OVER,
        default="draft",
        help="what early-exit scores are normalised over",
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "--golden-prompts",
        type=Path,
        metavar="FILE",
        help="JSON lines with 'prompt' or the application's fields (default: the adapter folder's)",
    )
    prompts.add_argument("--no-golden", action="store_true", help="write no golden traces")
    add("--force", action="store_true", help="convert again even if the bundle is up to date")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def convert_command(arguments: argparse.Namespace) -> None:
    """Body of the command."""
    plan = plan_conversion(
        Request(
            adapter=arguments.adapter,
            base=arguments.base,
            models=arguments.models,
            output=arguments.output,
            targets=TARGETS if arguments.target == "both" else (arguments.target,),
            num_nodes=arguments.nodes,
            num_kept=arguments.keep,
            context=arguments.context,
            chunk=arguments.chunk,
            prune_over=arguments.prune_over,
            golden_prompts=arguments.golden_prompts,
            golden=not arguments.no_golden,
        )
    )
    outcome = None if arguments.force else _up_to_date(plan)
    if outcome is None:
        with progress(NUM_STAGES, "read") as advance:
            outcome = convert(plan, advance)
    if arguments.json:
        print_json(summary(plan, outcome))
    else:
        print_summary(plan, outcome)


def _up_to_date(plan: Plan) -> Outcome | None:
    bundle = existing_bundle(plan)
    return bundle and Outcome(bundle, {}, (), ("up to date: same inputs, nothing was converted (--force)",))


def parts_of(bundle: Bundle) -> dict[str, int]:
    """Bytes by part of the bundle; a package and the golden files count as one part each."""
    parts: dict[str, int] = {}
    for name, entry in bundle.manifest.files.items():
        folders = Path(name).parts
        packages = [i for i, part in enumerate(folders) if part.endswith(".mlpackage")]
        if packages:
            name = "/".join(folders[: packages[0] + 1])
        elif folders[0] == "golden":
            name = "golden"
        elif len(folders) == 1:
            name = "tokenizer"
        parts[name] = parts.get(name, 0) + entry["bytes"]
    return parts


def summary(plan: Plan, outcome: Outcome) -> dict:
    """What was converted, as JSON: files in bytes, parameters by part, seconds by stage."""
    adapter = outcome.bundle.adapter(plan.adapter.app)
    return {
        "bundle": str(plan.output),
        "adapter": plan.adapter.app,
        "base": plan.base.identity.name,
        "bytes": parts_of(outcome.bundle),
        "parameters": {"base": plan.base.architecture.num_parameters(), **adapter.parameters},
        "seconds": outcome.seconds,
        "reused": list(outcome.reused),
        "notes": list(outcome.notes),
    }


def print_summary(plan: Plan, outcome: Outcome) -> None:
    """The same for people."""
    screen, facts = console(), summary(plan, outcome)
    table = Table(title=f"{plan.output}", title_justify="left", show_header=False, box=SIMPLE)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, count in facts["bytes"].items():
        table.add_row(name, size_text(count))
    table.add_section()
    for name, count in facts["parameters"].items():
        if count:
            table.add_row(f"parameters: {name.replace('_', ' ')}", f"{count:,}")
    table.add_section()
    for name, seconds in facts["seconds"].items():
        table.add_row(f"time: {name}", f"{seconds:.1f} s")
    for name in facts["reused"]:
        table.add_row(f"time: {name}", "from an earlier run")
    screen.print(table)
    for note in facts["notes"]:
        screen.print(note, markup=False)
