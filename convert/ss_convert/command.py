"""`ss-convert`: base and adapter folders to a bundle for Core ML and MLX."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from ss_convert import sizes_command
from ss_convert.audit import command as audit
from ss_convert.conversion import Outcome, convert, existing_bundle, num_stages
from ss_convert.coreml.options import CHOICES, PRESETS, PRUNE_OVER, CoreMLOptions
from ss_convert.coreml.weight_format import WEIGHT_FORMATS
from ss_convert.package_settings import PackageSettings
from ss_convert.planning import (
    FUNCTION_DTYPES,
    TARGETS_OF,
    Plan,
    Request,
    output_folder,
    plan_conversion,
)
from ss_device.bundle import GOLDEN, Bundle, inputs_of, is_bundle
from ss_device.command_line import (
    CommandParser,
    add_device,
    console,
    positive,
    print_json,
    progress,
    run_command,
    size_text,
)
from ss_device.outputs import check_output_folder, discard_partial, output_lock


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
    add = parser.add_argument
    _add_inputs(add)
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--output", type=Path, metavar="DIR", help="bundle folder (default: build/<app>)")
    place.add_argument("--into", type=Path, metavar="BUNDLE", help="add the adapters to an existing bundle")
    add(
        "--target",
        choices=TARGETS_OF,
        help="coreml, mlx, mlxfn (mlx and exported MLX functions), both (coreml and mlx, the default) or "
        "all; with --into the bundle's",
    )
    add(
        "--mlxfn-dtype",
        choices=FUNCTION_DTYPES,
        help=f"dtype of exported MLX functions (default {FUNCTION_DTYPES[0]})",
    )
    add("--keep", type=positive, metavar="K", help="nodes left after early-exit pruning (default: all)")
    add(
        "--prune-over",
        choices=PRUNE_OVER,
        help="what early-exit scores are normalised over (with pruning; default draft)",
    )
    _add_form(parser.add_argument_group("Core ML package (with --into: as it is in the bundle)"))
    _add_golden(parser.add_mutually_exclusive_group())
    add(
        "--force",
        action="store_true",
        help="replace the existing bundle, even one from the same inputs",
    )
    add_device(parser, "golden traces")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _add_inputs(add: Callable) -> None:
    """What is converted."""
    add(
        "--adapter",
        required=True,
        action="append",
        metavar="NAME|PATH",
        help="adapter folder, or its name under models/adapters; may be repeated",
    )
    add(
        "--base",
        type=Path,
        metavar="PATH|ID",
        help="base model folder or id on the Hugging Face hub (default: the adapter's, under models/base)",
    )
    add(
        "--models",
        type=Path,
        metavar="DIR",
        help="folder with base/ and adapters/ (default: $SS_MODELS or models)",
    )


def _add_golden(group) -> None:
    """Prompts of the golden traces."""
    group.add_argument(
        "--golden-prompts",
        type=Path,
        metavar="FILE",
        help="JSON lines with 'prompt' or the application's fields (default: the adapter folder's)",
    )
    group.add_argument("--no-golden", action="store_true", help="write no golden traces")


def _add_form(group) -> None:
    """Options of `PackageSettings`."""
    _add_sizes(group.add_argument)
    _add_graph(group.add_argument)
    _add_weights(group.add_argument)


def _add_sizes(add: Callable) -> None:
    """How much a call takes and the cache holds."""
    add("--nodes", type=positive, dest="num_nodes", metavar="N", help="tree nodes per step (default 32)")
    add("--context", type=positive, metavar="N", help="tokens the cache holds (default 512)")
    add(
        "--prefill",
        "--chunk",
        type=positive,
        dest="chunk",
        metavar="N",
        help="prompt tokens per prefill call (default 64)",
    )


def _add_graph(add: Callable) -> None:
    """What the functions are made of."""
    add(
        "--preset",
        choices=sorted(PRESETS),
        help="choices that suit an engine; the choices below override it",
    )
    for name, says in (
        ("layout", "products as linear or as 1×1 convolution"),
        ("attention", "products and softmax, or the fused operation"),
        ("commit", "how accepted rows are moved to their slots"),
    ):
        add(f"--{name}", choices=CHOICES[name], help=f"{says} {_default(name)}")
    add(
        "--head-split",
        type=_count,
        metavar="V",
        help=f"most outputs of a product of the head, 0: all {_default('head_split')}",
    )
    add(
        "--pad-state",
        action=argparse.BooleanOptionalAction,
        default=None,
        help=f"round the state's last dimension up to a multiple of 32 {_default('pad_state')}",
    )
    add(
        "--prune-in-graph",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="early-exit pruning inside the step, to --keep nodes or half of --nodes (default: where "
        "--keep is below --nodes)",
    )
    add(
        "--parts",
        type=_parts,
        metavar="N|auto",
        help="packages that the layers are divided into; auto: files under 1 GB (default 1)",
    )


def _add_weights(add: Callable) -> None:
    """How weights are stored, adapters' included, and what the step returns."""
    add("--weights", choices=WEIGHT_FORMATS, help="how the base's projections are stored (default fp16)")
    add(
        "--embedding-weights",
        choices=WEIGHT_FORMATS,
        help="how embedding and head are stored (default: fp16 with fp16, else int8)",
    )
    add(
        "--lora",
        choices=CHOICES["lora"],
        help="adapters as constants of functions of their own, or as inputs of functions that all share "
        "(shared mode only; default baked)",
    )
    add(
        "--lora-rank",
        type=positive,
        metavar="R",
        help="rank that LoRA inputs are padded to (default: the largest, up to a multiple of 32)",
    )
    add(
        "--sampling",
        action="store_true",
        default=None,
        help="the step returns the logits of all kept nodes and their streams, for sampling on the host",
    )


def _default(name: str) -> str:
    """What a choice of the graph is without a preset and with each."""
    said = {
        None: getattr(CoreMLOptions, name),
        **{preset: chosen[name] for preset, chosen in PRESETS.items()},
    }
    texts = {p: "on" if v is True else "off" if v is False else str(v) for p, v in said.items()}
    presets = ", ".join(f"{texts[preset]} with {preset}" for preset in sorted(PRESETS))
    return f"(default {texts[None]}; {presets})"


def _count(text: str) -> int:
    """argparse type: 0 or more."""
    return 0 if text.strip() == "0" else positive(text)


def _parts(text: str) -> int | str:
    """argparse type: 1 or more, or `auto`."""
    return "auto" if text.strip() == "auto" else positive(text)


def convert_command(arguments: argparse.Namespace) -> None:
    """Body of the command."""
    request = _request(arguments)
    # From the first look at a bundle to its replacement: what another process adds must not be lost.
    with output_lock(output_folder(request)):
        plan = plan_conversion(request)
        outcome = None if arguments.force else _up_to_date(plan)
        if outcome is not None:
            discard_partial(plan.output)
        else:
            _check_replaced(plan, arguments.force)
            with progress(num_stages(plan), "read") as advance:
                outcome = convert(plan, advance)
    if arguments.json:
        print_json(summary(plan, outcome))
    else:
        print_summary(plan, outcome)


def _request(arguments: argparse.Namespace) -> Request:
    target = arguments.target
    return Request(
        adapters=tuple(arguments.adapter),
        base=arguments.base,
        models=arguments.models,
        output=arguments.output,
        into=arguments.into,
        targets=None if target is None else TARGETS_OF[target],
        function_dtype=arguments.mlxfn_dtype,
        num_kept=arguments.keep,
        prune_over=arguments.prune_over,
        prune_in_graph=arguments.prune_in_graph,
        package=PackageSettings(
            **{f.name: getattr(arguments, f.name, None) for f in fields(PackageSettings)}
        ),
        golden_prompts=arguments.golden_prompts,
        golden=not arguments.no_golden,
        device=arguments.device,
    )


def _check_replaced(plan: Plan, force: bool) -> None:
    """UserError where the output holds a bundle, unless it is extended or is to be replaced.

    Also for a bundle that holds files of the user's own, which would go with it. A damaged one from the
    same inputs is mended.
    """
    if plan.into is None:
        damaged = inputs_of(plan.output) == plan.inputs
        check_output_folder(plan.output, "a bundle", is_bundle, force or damaged)


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
