"""`ss-convert`: base and adapter folders to a bundle for Core ML and MLX."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from ss_convert import sizes_command
from ss_convert.audit import command as audit
from ss_convert.conversion import Outcome, make_bundle
from ss_convert.planning import Plan
from ss_convert.settings import ConversionSettings
from ss_device.bundle import GOLDEN, Bundle
from ss_device.command_line import CommandParser, console, print_json, progress, run_command, size_text
from ss_device.settings import add_settings, settings_of


def main(argv: list[str] | None = None) -> int:
    """Entry point of `ss-convert` and its sub-commands `audit` and `sizes`; returns the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["audit"]:
        return run_command(audit.parser(), audit.audit_command, argv[1:])
    if argv[:1] == ["sizes"]:
        return run_command(sizes_command.parser(), sizes_command.sizes_command, argv[1:])
    return run_command(_parser(), convert_command, argv)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="ss-convert",
        description="Convert a base model and an adapter to one bundle: MLX weights, a Core ML package "
        "and the reference's golden traces. 'ss-convert audit BUNDLE' examines one, 'ss-convert sizes' "
        "compares what packages weigh.",
        example="ss-convert --adapter sqlctx",
    )
    add_settings(parser, ConversionSettings)
    parser.add_argument(
        "--force", action="store_true", help="replace the existing bundle, even one from the same inputs"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def convert_command(arguments: argparse.Namespace) -> None:
    """Body of the command."""
    settings = settings_of(arguments, ConversionSettings)
    plan, outcome = make_bundle(settings, arguments.force, lambda stages: progress(stages, "read"))
    if arguments.json:
        print_json(summary(plan, outcome))
    else:
        print_summary(plan, outcome)


def parts_of(bundle: Bundle) -> dict[str, int]:
    """Bytes by part of the bundle; a package and the golden files count as one part each."""
    parts: dict[str, int] = {}
    for name, entry in bundle.manifest.files.items():
        folders = Path(name).parts
        packages = [i for i, part in enumerate(folders) if part.endswith(".mlpackage")]
        if packages:
            name = "/".join(folders[: packages[0] + 1])
        elif folders[0] == GOLDEN:
            name = GOLDEN
        elif len(folders) == 1:
            name = "tokenizer"
        parts[name] = parts.get(name, 0) + entry.bytes
    return parts


def summary(plan: Plan, outcome: Outcome) -> dict:
    """What was converted, as JSON: files in bytes, parameters by part, seconds by stage."""
    names = [planned.app for planned in plan.adapters]
    entries = {name: outcome.bundle.adapter(name) for name in names}
    return {
        "bundle": str(plan.output),
        "adapters": sorted(outcome.bundle.manifest.adapters),
        "converted": names,
        "base": plan.base.identity.name,
        "package": plan.package.to_dict(),
        "bytes": parts_of(outcome.bundle),
        "package_bytes": outcome.bundle.manifest.made.package_bytes,
        "parameters": {
            "base": plan.base.architecture.num_parameters(),
            **{name: entry.parameters for name, entry in entries.items()},
        },
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
    table.add_row("parameters: base", f"{facts['parameters']['base']:,}")
    for app in facts["converted"]:
        for name, count in facts["parameters"][app].items():
            if count:
                table.add_row(f"parameters: {app} {name.replace('_', ' ')}", f"{count:,}")
    table.add_section()
    for name, seconds in facts["seconds"].items():
        table.add_row(f"time: {name}", f"{seconds:.1f} s")
    for name in facts["reused"]:
        table.add_row(f"time: {name}", "from an earlier run")
    screen.print(table)
    for note in facts["notes"]:
        screen.print(note, markup=False)
