"""`ss-convert audit`: what a package costs and what may leave the engine it was made for."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from ss_convert.audit.devices import DEFAULTS, DEVICES, Device, device_named
from ss_device.command_line import CommandParser, console, print_json, size_text
from ss_device.errors import UserError, library_errors, one_line
from ss_device.outputs import check_new_file, write_text
from ss_device.settings import add_settings, setting, settings_of

ENGINES = ("ane", "gpu")
SHOWN_HAZARDS = 30


def _positive(text: str) -> float:
    value = _not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from error
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 up")
    return value


@dataclass(frozen=True)
class AuditSettings:
    """What is audited (a bundle folder or any .mlpackage), for which engine, with whose figures."""

    bundle: Path
    engine: str | None = setting(
        choices=ENGINES,
        help="engine it is meant for (default: by how attention is written, ane where that is unknown)",
    )
    device: str | None = setting(
        metavar="NAME", help=f"figures to estimate with: {', '.join(sorted(DEVICES))}"
    )
    bandwidth: float | None = setting(
        parse=_positive, metavar="GB/S", help="your own figure in place of the device's"
    )
    compute: float | None = setting(
        parse=_positive, metavar="TFLOP/S", help="your own figure in place of the device's"
    )
    overhead: float | None = setting(
        parse=_not_negative, metavar="MS", help="per call (default: the device's, 0)"
    )
    html: Path | None = setting(metavar="FILE", help="also write a report with plots")
    force: bool = setting(False, help="replace an existing report")


def parser() -> CommandParser:
    """Options of the sub-command."""
    made = CommandParser(
        prog="ss-convert audit",
        description="Predict placement hazards and the cost of a call from a saved Core ML package. On a "
        "Mac also asks Core ML where it would place every operation.",
        example="ss-convert audit build/sqlctx --engine ane --html audit.html",
    )
    made.add_argument("bundle", type=Path, help="bundle folder, or any .mlpackage")
    add_settings(made, AuditSettings)
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def audit_command(arguments: argparse.Namespace) -> None:
    """Body of the command."""
    from ss_convert.audit.html import to_html
    from ss_convert.audit.report import audit

    settings = settings_of(arguments, AuditSettings)
    if settings.html:
        check_new_file(settings.html, settings.force)
    engine = settings.engine or _engine_of(settings.bundle)
    with library_errors(f"{settings.bundle}: not a package that can be read"):
        found = audit(settings.bundle, engine, _device(settings, engine))
    if sys.platform == "darwin":
        found = with_placement(found, settings.bundle)
    if settings.html:
        write_text(settings.html, to_html(found))
    if arguments.json:
        print_json(found.to_dict())
    else:
        _print(found)


def with_placement(found, source: Path, tools=None):
    """The audit with what Core ML says of every package (`placement.py`)."""
    from ss_convert.audit.placement import placement
    from ss_executor import load_package

    packages = []
    for package in found.packages:
        path = source if source.suffix == ".mlpackage" else source / package.path
        places = placement(path, load_package(path).functions, found.engine, tools)
        packages.append(replace(package, placement=places))
    return replace(found, packages=packages)


def _engine_of(source: Path) -> str:
    """The engine that the attention of a bundle or of a package of ss-convert was made for; else `ane`."""
    from ss_device.bundle import MANIFEST, open_bundle
    from ss_executor import ExecutorError, load_package

    graphs = []
    if (source / MANIFEST).is_file():
        entries = open_bundle(source).manifest.adapters.values()
        graphs = [entry.coreml.graph for entry in entries if entry.coreml is not None]
    elif source.suffix == ".mlpackage":
        try:
            graphs = [load_package(source).metadata]
        except ExecutorError as error:
            raise UserError(one_line(error)) from error
    return "gpu" if any(graph.get("attention") == "fused" for graph in graphs) else "ane"


def _device(settings: AuditSettings, engine: str) -> Device:
    device = device_named(settings.device or DEFAULTS[engine])
    if device.engine != engine:
        raise UserError(
            f"--device {device.name} has figures of engine '{device.engine}', the audit is for '{engine}'"
        )
    own = {n: getattr(settings, n) for n in ("bandwidth", "compute", "overhead")}
    said = {name: value for name, value in own.items() if value is not None}
    if said:
        device = replace(device, **said, source=f"{device.source}; {', '.join(said)} given by the user")
    return device


def _print(found) -> None:
    screen, device = console(), found.device
    screen.print(
        f"{found.source}: engine {found.engine}; estimates from {device.bandwidth:g} GB/s, "
        f"{device.compute:g} TFLOP/s ({device.name}: {device.source}); measured on a device: "
        f"{'what stands behind on this Mac' if any(p.placement for p in found.packages) else 'nothing'}",
        markup=False,
        soft_wrap=True,
    )
    for package in found.packages:
        _print_package(screen, package)


def _print_package(screen, package) -> None:
    sizes = ", ".join(f"{kind} {size_text(count)}" for kind, count in package.kinds.items())
    own = ", ".join(f"{app} {size_text(count)}" for app, count in package.own_bytes.items())
    lines = (
        f"{package.path}: weights {size_text(package.weight_bytes)} ({sizes})",
        f"  base and tables {size_text(package.shared_bytes)}; of one adapter alone: {own}",
        f"  state {size_text(package.state_bytes)}",
    )
    for line in lines:
        screen.print(line, markup=False, soft_wrap=True)
    screen.print(_function_table(package))
    for function in package.functions:
        counts = ", ".join(f"{op} {count}" for op, count in function.operations.items())
        screen.print(f"  {function.name}: {counts}", markup=False, soft_wrap=True)
    for name, places in package.placement.items():
        screen.print(f"  {name} on this Mac: {_places_text(places)}", markup=False, soft_wrap=True)
    screen.print(f"{len(package.hazards)} hazards", markup=False)
    for hazard in package.hazards[:SHOWN_HAZARDS]:
        screen.print(
            f"  {hazard.effect}: {hazard.function}, {hazard.operation} '{hazard.where}': {hazard.detail} "
            f"[{hazard.rule}: {hazard.source}]",
            markup=False,
            soft_wrap=True,
        )
    if len(package.hazards) > SHOWN_HAZARDS:
        screen.print(f"  and {len(package.hazards) - SHOWN_HAZARDS} more (--json lists all)")


def _places_text(places: dict) -> str:
    """One function's placement: time, operations and cost by device, what runs on the CPU."""
    devices = ", ".join(
        f"{device} {count} operations ({places['cost_shares'].get(device, 0.0):.1%} of the estimated cost)"
        for device, count in places["devices"].items()
    )
    moved = ", ".join(f"{op} {count}" for op, count in places["on_cpu"].items()) or "none"
    return f"{1e3 * places['seconds']:.3f} ms; {devices}; on the CPU: {moved}"


def _function_table(package) -> Table:
    table = Table(box=SIMPLE)
    for column in (
        "function",
        "MFLOP",
        "weights",
        "state",
        "FLOP/byte",
        "rows",
        "memory",
        "compute",
        "step",
    ):
        table.add_column(column, justify="left" if column in ("function", "rows") else "right")
    for function in package.functions:
        costs = function.costs
        table.add_row(
            function.name,
            f"{costs.flops / 1e6:,.1f}",
            size_text(costs.weight_bytes),
            size_text(costs.state_bytes),
            f"{costs.intensity:.1f}",
            ", ".join(f"{group}: {rows}" for group, rows in costs.rows.items()),
            *(f"{1e3 * function.seconds[part]:.3f} ms" for part in ("memory", "compute", "step")),
        )
    return table
