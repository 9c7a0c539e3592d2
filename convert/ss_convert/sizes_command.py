"""`ss-convert sizes`: what packages of 1, 2, … adapters weigh, for every weight format."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from ss_convert.disk import one_line_when_full
from ss_convert.graph.weight_format import WEIGHT_FORMATS, stored_bytes, weight_format_of
from ss_convert.planning import Plan, plan_conversion
from ss_convert.settings import ConversionSettings
from ss_convert.weight_source import WeightSource
from ss_device.adapter import Adapter
from ss_device.command_line import CommandParser, console, print_json, progress, size_text
from ss_device.settings import add_settings, setting, settings_of

# What a weight file may take beyond base and adapters: tables, masks, alignment. The description of the
# functions (`model.mlmodel`, a fixed number of bytes per adapter) comes on top: see `packages`.
ALLOWANCE = 0.03
# Parts that the host reads from the adapter's own file.
NOT_IN_PACKAGE = "bigram."


@dataclass(frozen=True)
class SizesSettings:
    """Whose packages are built, and with which weight formats."""

    adapters: tuple[str, ...] = setting(
        (), flag="--adapter", required=True, metavar="NAME|PATH", help="may be repeated"
    )
    base: Path | None = setting(metavar="PATH", help="base model folder (default: the adapter's)")
    models: Path | None = setting(metavar="DIR", help="folder with base/ and adapters/")
    weights: tuple[str, ...] = setting(
        WEIGHT_FORMATS, choices=WEIGHT_FORMATS, help="may be repeated (default: all)"
    )


def parser() -> CommandParser:
    """Options of the sub-command."""
    made = CommandParser(
        prog="ss-convert sizes",
        description="Build Core ML packages of the first 1, 2, … adapters with every --weights in a "
        "temporary folder and compare their weight files, and the packages whole, with what base and "
        "adapters take by themselves.",
        example="ss-convert sizes --adapter sqlctx --adapter models/adapters/mine",
    )
    add_settings(made, SizesSettings)
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def sizes_command(arguments: argparse.Namespace) -> None:
    """Body of the command."""
    settings, rows = settings_of(arguments, SizesSettings), []
    plans = [_plan(settings, weight_format) for weight_format in settings.weights]
    with progress(len(plans) * (len(settings.adapters) + 1), "read") as advance:
        for plan in plans:
            rows.append(measure(plan, advance))
    if arguments.json:
        print_json({"rows": rows})
    else:
        _print(rows)


def _plan(settings: SizesSettings, weight_format: str) -> Plan:
    return plan_conversion(
        ConversionSettings(
            adapters=settings.adapters,
            base=settings.base,
            models=settings.models,
            output=Path(tempfile.gettempdir()) / "ss-convert-sizes",
            targets=("coreml",),
            weights=weight_format,
            golden=False,
        )
    )


def measure(plan: Plan, report=lambda text: None) -> dict:
    """Bytes of one weight format: `base` and `own` from shapes alone, `merged` and `packages` as written.

    Entry i of a list has the first i+1 adapters. merged: weight files; packages: all files; over and
    packages_over: share beyond base + own; within: no weight file is more than 3 % beyond.
    """
    from ss_convert import coreml_stage

    weights = WeightSource(plan.base)
    merged, packages = [], []
    place = Path(tempfile.gettempdir())
    with one_line_when_full(place), tempfile.TemporaryDirectory(prefix="ss-convert-sizes-") as name:
        folder = Path(name)
        for planned in plan.adapters:
            report(f"{plan.package.weights} {planned.app}")
            coreml_stage.write_functions(plan, planned, folder, weights)
        report(f"{plan.package.weights} packages")
        for count in range(1, len(plan.adapters) + 1):
            fewer = replace(plan, adapters=plan.adapters[:count])
            functions = coreml_stage.merge(fewer, folder)
            merged.append(coreml_stage.sizes(fewer, folder, functions)["weight_bytes"])
            files = (f for p in fewer.packages for f in (folder / p).rglob("*") if f.is_file())
            packages.append(sum(file.stat().st_size for file in files))
    base = base_bytes(plan)
    own = {planned.app: own_bytes(planned.adapter) for planned in plan.adapters}
    sums = [base + sum(list(own.values())[: i + 1]) for i in range(len(own))]
    return {
        "weights": plan.package.weights,
        "embedding_weights": plan.package.embedding_weights,
        "base": base,
        "own": own,
        "merged": merged,
        "packages": packages,
        "over": _beyond(merged, sums),
        "packages_over": _beyond(packages, sums),
        "within": all(s <= t * (1 + ALLOWANCE) for s, t in zip(merged, sums, strict=True)),
    }


def _beyond(sizes: list[int], sums: list[int]) -> list[float]:
    """Shares by which sizes exceed what base and adapters take."""
    return [round(size / total - 1, 5) for size, total in zip(sizes, sums, strict=True)]


def base_bytes(plan: Plan) -> int:
    """Bytes of all base weights as they are stored."""
    formats = (plan.package.weights, plan.package.embedding_weights)
    shapes = plan.base.architecture.weight_shapes()
    return sum(
        stored_bytes(shape, weight_format_of(name, shape, formats)) for name, shape in shapes.items()
    )


def own_bytes(adapter: Adapter) -> int:
    """Bytes of an adapter's parts that a package holds, in fp16."""
    parts = [t for name, t in adapter.tensors.items() if not name.startswith(NOT_IN_PACKAGE)]
    return 2 * sum(part.size for part in [*parts, *adapter.lora_tensors().values()])


def _print(rows: list[dict]) -> None:
    apps = list(rows[0]["own"])
    table = Table(box=SIMPLE)
    for column in ("weights", "base", *apps):
        table.add_column(column, justify="right" if column != "weights" else "left")
    for what in ("weights", "package"):
        for count in range(1, len(apps) + 1):
            table.add_column(f"{what} of {count}", justify="right")
    table.add_column(f"weights ≤ sum + {ALLOWANCE:.0%}")
    for row in rows:
        sizes = [
            f"{size_text(size)} ({over:+.1%})"
            for kind, beyond in (("merged", "over"), ("packages", "packages_over"))
            for size, over in zip(row[kind], row[beyond], strict=True)
        ]
        own = [size_text(row["own"][app]) for app in apps]
        within = "yes" if row["within"] else "no"
        table.add_row(row["weights"], size_text(row["base"]), *own, *sizes, within)
    console().print(table)
