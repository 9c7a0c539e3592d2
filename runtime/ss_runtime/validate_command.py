"""`ss-validate`: replay a bundle's golden traces on every back end of this machine."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from ss_device.bundle import Bundle, BundledAdapter, open_bundle
from ss_device.command_line import CommandParser, console, positive, print_json, progress, run_command
from ss_device.errors import UserError
from ss_device.trace import Trace, load_traces
from ss_runtime.backends import DTYPES, check_backend, default_dtype, open_backend, why_not
from ss_runtime.coreml_model import COMPUTE_UNITS
from ss_runtime.tokenization import BundleTokenizer, load_tokenizer
from ss_runtime.validation import TOLERANCES, Replay, golden_of, has_exact_weights, replay

DEFAULTS = (("mlx", "float32"), ("executor", "float32"), ("executor", "float16"))
SHOWN_DIFFERENCES = 20
NUMBERS = ("prompts", "exact", "steps", "nodes", "max |Δ logit|", "near ties", "other", "seconds")


def main(argv: list[str] | None = None) -> int:
    """Entry point of `ss-validate`.

    → the exit code: 0 where every adapter was compared on some back end and every comparison passes; 1
    where one does not, be it that a replay came to no comparison; 2 for bad input: a damaged bundle, no or
    damaged golden traces, an adapter that no back end here can run.
    """
    parser = CommandParser(
        prog="ss-validate",
        description="Replay the PyTorch reference's golden traces on other back ends and report every "
        "difference. Exit code 1 if one is more than rounding or a replay compares nothing, 2 if there "
        "is nothing to replay.",
        example="ss-validate build/sqlctx --backend mlx --backend executor:float16",
    )
    parser.add_argument("bundle", type=Path, help="bundle folder made by ss-convert")
    parser.add_argument("--adapter", help="one adapter of the bundle (default: all with golden traces)")
    parser.add_argument(
        "--backend",
        action="append",
        metavar="NAME[:DTYPE]",
        help=f"{', '.join(DTYPES)}; may be repeated (default: all that this machine can run)",
    )
    parser.add_argument(
        "--dtype", "--arithmetic", choices=sorted(TOLERANCES), help="arithmetic where NAME gives none"
    )
    parser.add_argument(
        "--compute-units",
        choices=tuple(COMPUTE_UNITS),
        help="engines that back end coreml may use (default all)",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N prompts")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return run_command(parser, validate, argv)


def validate(arguments: argparse.Namespace) -> int:
    """Body of the command."""
    wanted = _wanted(arguments)
    bundle = open_bundle(arguments.bundle, verify=True)
    names = [arguments.adapter] if arguments.adapter else sorted(bundle.manifest.adapters)
    if not names:
        raise UserError(f"{bundle.path}: no adapter in this bundle, so nothing to replay")
    tokenizer = load_tokenizer(bundle)
    left_out: list[dict] = []
    replays = {
        name: _validate_adapter(arguments, bundle, bundle.adapter(name), wanted, tokenizer, left_out)
        for name in names
    }
    passed = not any(r.failures for found in replays.values() for r in found)
    if arguments.json:
        results = [{"adapter": n, **r.to_dict()} for n, found in replays.items() for r in found]
        bundle_path = str(arguments.bundle)
        print_json({"bundle": bundle_path, "passed": passed, "results": results, "left_out": left_out})
    else:
        for name, found in replays.items():
            print_replays(name, found)
        for entry in left_out:
            console().print(f"left out: {entry['backend']} ({entry['reason']})", markup=False)
    return 0 if passed else 1


def _validate_adapter(
    arguments: argparse.Namespace,
    bundle: Bundle,
    adapter: BundledAdapter,
    wanted: list[tuple[str, str]],
    tokenizer: BundleTokenizer,
    left_out: list[dict],
) -> list[Replay]:
    """An adapter on every back end; those that this machine cannot run go to `left_out`, but not all."""
    name, replays, missing = adapter.app, [], []
    for backend, dtype in [*wanted, *_exported(arguments, adapter)]:
        traces = golden_traces(bundle, adapter, arguments.limit, backend)
        check_prompts(traces, tokenizer, adapter)
        if (reason := why_not(backend, bundle, adapter)) is None:
            units = arguments.compute_units if backend == "coreml" else None
            replays.append(validate_backend(bundle, adapter, traces, backend, dtype, units))
        elif arguments.backend:
            raise UserError(f"back end '{backend}': {reason}")
        else:
            missing.append({"adapter": name, "backend": f"{backend}:{dtype}", "reason": reason})
    if not replays:
        reasons = "; ".join(f"{entry['backend']}: {entry['reason']}" for entry in missing)
        raise UserError(f"adapter '{name}': nothing can be compared here ({reasons})")
    left_out += missing
    return replays


def _wanted(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """(back end, arithmetic) pairs; unknown names are refused before anything is opened."""
    named = {text.partition(":")[0] for text in arguments.backend or ()}
    if arguments.compute_units and "coreml" not in named:
        raise UserError("--compute-units is for --backend coreml")
    if not arguments.backend:
        return [(b, d) for b, d in DEFAULTS if arguments.dtype in (None, d)]
    wanted = []
    for text in arguments.backend:
        name, _, dtype = text.partition(":")
        check_backend(name, dtype or arguments.dtype)
        dtype = dtype or arguments.dtype or default_dtype(name)
        if dtype not in TOLERANCES:
            raise UserError(f"arithmetic '{dtype}' has no tolerance (known: {', '.join(TOLERANCES)})")
        wanted.append((name, dtype))
    return wanted


def _exported(arguments: argparse.Namespace, adapter: BundledAdapter) -> list[tuple[str, str]]:
    """Exported functions, in their own arithmetic, where the bundle has some and no back end is named."""
    functions = adapter.mlxfn
    if arguments.backend or functions is None or functions.dtype not in TOLERANCES:
        return []
    return [("mlxfn", functions.dtype)] if arguments.dtype in (None, functions.dtype) else []


def golden_traces(
    bundle: Bundle, adapter: BundledAdapter, limit: int | None = None, backend: str = "mlx"
) -> list[Trace]:
    """The adapter's traces for a back end (`golden_of`). Raises UserError when the bundle came without."""
    stem = golden_of(adapter, backend)
    if stem is None:
        raise UserError(
            f"{bundle.path}: adapter '{adapter.app}' has no golden traces; convert again where PyTorch "
            "is installed"
        )
    traces = load_traces(bundle.path / stem, bundle.manifest.architecture.vocab_size)[:limit]
    bundle.check_unchanged()
    return traces


def check_prompts(traces: list[Trace], tokenizer: BundleTokenizer, adapter: BundledAdapter) -> None:
    """Raise UserError where the bundle encodes a golden prompt's text to other ids than were recorded."""
    for index, trace in enumerate(traces):
        if tuple(tokenizer.encode(trace.text)) != trace.prompt:
            raise UserError(
                f"golden prompt {index} of '{adapter.app}': the bundle's tokenizer encodes its text to "
                f"other token ids than were recorded; the traces are another tokenizer's"
            )


def validate_backend(
    bundle: Bundle,
    adapter: BundledAdapter,
    traces: list[Trace],
    backend: str,
    dtype: str,
    compute_units: str | None = None,
) -> Replay:
    """Open one back end and replay `traces` on it, with a progress bar."""
    started = time.perf_counter()
    found = Replay(backend, dtype, has_exact_weights(bundle, adapter, backend))
    with progress(len(traces) + 1, f"{backend} {dtype}") as advance:
        model = open_backend(backend, bundle, adapter, dtype, compute_units=compute_units)
        advance(f"{backend} {dtype}")
        try:
            replay(model, traces, found, advance=lambda _: advance(f"{backend} {dtype}"))
        except UserError as error:
            raise UserError(f"adapter '{adapter.app}' on {backend}: {error}") from error
    found.seconds = time.perf_counter() - started
    return found


def print_replays(name: str, replays: list[Replay]) -> None:
    """The table of one adapter and the differences: `near ties` that rounding explains, and `other`."""
    screen = console()
    table = Table(title=f"golden traces of '{name}'", title_justify="left", box=SIMPLE)
    for column in ("back end", "arithmetic"):
        table.add_column(column, no_wrap=True)
    for column in NUMBERS:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    for found in replays:
        others = len(found.differences) - found.near_ties
        table.add_row(
            found.backend,
            found.arithmetic,
            str(found.prompts),
            str(found.token_exact),
            str(found.steps),
            str(found.nodes),
            f"{found.max_logit_difference:.2g}",
            str(found.near_ties),
            str(others),
            f"{found.seconds:.1f}",
            "FAILED" if found.failures else "passed",
        )
    screen.print(table)
    for found in replays:
        _print_notes(found)


def _print_notes(found: Replay) -> None:
    for line in notes(found):
        console().print(line, markup=False, soft_wrap=True)


def notes(found: Replay) -> list[str]:
    """Lines under the table: why a replay fails, what counts as a near tie, the differences."""
    limit, cap = found.near_tie_limit, 100 * found.tolerance.near_tie
    lines = list(found.failures)
    if found.dropped_nodes:
        lines.append(f"{found.dropped_nodes} nodes pruned that the reference kept")
    if found.broken_off:
        lines.append(f"prompts {found.broken_off} end early: the accepted path was pruned")
    if found.differences:
        lines.append(
            f"near tie: the reference's top-1/top-2 margin is at most {limit:.3g} (twice the largest "
            f"logit difference, at most {cap:g} % of the largest logit)"
        )
    for d in found.differences[:SHOWN_DIFFERENCES]:
        kind = "near tie" if found.is_near_tie(d) else "DIFFERENT"
        lines.append(
            f"{kind}: prompt {d.prompt}, step {d.step}, node {d.node}, position {d.position}: token "
            f"{d.chosen} instead of {d.expected}, margin {d.margin:.3g}"
        )
    if (more := len(found.differences) - SHOWN_DIFFERENCES) > 0:
        lines.append(f"and {more} more (--json lists all)")
    return [f"{found.backend} {found.arithmetic}: {line}" for line in lines]
