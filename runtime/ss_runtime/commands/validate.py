"""`ss-validate`: replay golden traces on every back end of this machine, or record them."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from ss_device.bundle import Bundle, BundledAdapter, open_bundle
from ss_device.command_line import (
    CommandParser,
    add_device,
    console,
    positive,
    print_json,
    progress,
    run_command,
)
from ss_device.errors import UserError
from ss_device.trace import Recorded, Trace, load_traces, trace_record
from ss_runtime.backends import DTYPES, check_backend, default_dtype, open_backend, why_not
from ss_runtime.commands.replay_table import origin_text, print_replays
from ss_runtime.coreml.step_model import COMPUTE_UNITS
from ss_runtime.recorded_traces import record_bundle, traces_of, weights_are_exact, why_not_replayed
from ss_runtime.tokenization import BundleTokenizer, load_tokenizer
from ss_runtime.validation import TOLERANCES, ReplayOutcome, golden_of, has_exact_weights, replay_traces

DEFAULTS = (("mlx", "float32"), ("executor", "float32"), ("executor", "float16"))


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
        "is nothing to replay. --record makes traces of a bundle on one machine, --traces replays them on "
        "another.",
        example="ss-validate build/sqlctx --backend mlx --backend executor:float16\n"
        "  ss-validate build/sqlctx --record traces --device cuda\n"
        "  ss-validate build/sqlctx --traces traces",
    )
    parser.add_argument("bundle", type=Path, help="bundle folder made by ss-convert")
    parser.add_argument("--adapter", help="one adapter of the bundle (default: all with golden traces)")
    parser.add_argument(
        "--backend",
        action="append",
        metavar="NAME[:DTYPE]",
        help=f"{', '.join(DTYPES)}; may be repeated (default: all that this machine can run)",
    )
    parser.add_argument("--dtype", choices=sorted(TOLERANCES), help="dtype where NAME gives none")
    parser.add_argument(
        "--compute-units",
        choices=tuple(COMPUTE_UNITS),
        help="engines that back end coreml may use (default all)",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N prompts")
    parser.add_argument(
        "--traces", type=Path, metavar="DIR", help="replay what --record wrote, not the bundle's own traces"
    )
    add_device(parser, "--record and --backend reference")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    recording = parser.add_argument_group("recording, with PyTorch on the bundle's own weights")
    recording.add_argument("--record", type=Path, metavar="DIR", help="write traces, replay nothing")
    recording.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="JSON lines with 'prompt' or the application's fields (default: the bundle's golden prompts)",
    )
    recording.add_argument("--force", action="store_true", help="replace existing traces")
    return run_command(parser, validate, argv)


def validate(arguments: argparse.Namespace) -> int:
    """Body of the command."""
    wanted = _wanted(arguments)
    bundle = open_bundle(arguments.bundle, verify=True)
    names = [arguments.adapter] if arguments.adapter else sorted(bundle.manifest.adapters)
    if not names:
        raise UserError(f"{bundle.path}: no adapter in this bundle, so nothing to replay")
    if arguments.record:
        return _record(arguments, bundle, names)
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


def _record(arguments: argparse.Namespace, bundle: Bundle, names: list[str]) -> int:
    """Body of --record."""
    recordings = record_bundle(
        bundle,
        [bundle.adapter(name).app for name in names],
        arguments.record,
        arguments.dtype or "float32",
        arguments.device,
        arguments.prompts,
        arguments.limit,
        arguments.force,
    )
    if arguments.json:
        found = [recording.to_dict() for recording in recordings]
        print_json({"bundle": str(arguments.bundle), "traces": str(arguments.record), "recorded": found})
        return 0
    for done in recordings:
        console().print(
            f"{done.adapter}: {done.prompts} prompts, {done.tokens} tokens in {done.calls} calls on "
            f"{origin_text(done.origin)}, {done.seconds:.1f} s",
            markup=False,
            soft_wrap=True,
        )
    return 0


def _validate_adapter(
    arguments: argparse.Namespace,
    bundle: Bundle,
    adapter: BundledAdapter,
    wanted: list[tuple[str, str]],
    tokenizer: BundleTokenizer,
    left_out: list[dict],
) -> list[ReplayOutcome]:
    """An adapter on every back end; those that this machine cannot run go to `left_out`, but not all."""
    name, replays, missing = adapter.app, [], []
    for backend, dtype in [*wanted, *_exported(arguments, adapter)]:
        reason = why_not(backend, bundle, adapter)
        if arguments.traces is None:
            traces, origin = golden_traces(bundle, adapter, arguments.limit, backend)
            exact = has_exact_weights(bundle, adapter, backend)
        else:
            traces, origin = traces_of(bundle, adapter, arguments.traces, arguments.limit)
            exact = weights_are_exact(bundle, backend, origin)
            reason = reason or why_not_replayed(bundle, adapter, backend)
        check_prompts(traces, tokenizer, adapter)
        if reason is None:
            found = ReplayOutcome(backend, dtype, exact, origin)
            validate_backend(bundle, adapter, traces, found, _engine_options(arguments, backend))
            replays.append(found)
        elif arguments.backend:
            raise UserError(f"back end '{backend}': {reason}")
        else:
            missing.append({"adapter": name, "backend": f"{backend}:{dtype}", "reason": reason})
    if not replays:
        reasons = "; ".join(f"{entry['backend']}: {entry['reason']}" for entry in missing)
        raise UserError(f"adapter '{name}': nothing can be compared here ({reasons})")
    left_out += missing
    return replays


def _engine_options(arguments: argparse.Namespace, backend: str) -> dict:
    """Options of `open_backend` that only one back end has."""
    given = {"coreml": "compute_units", "reference": "device"}.get(backend)
    return {given: getattr(arguments, given)} if given else {}


def _check_recording(arguments: argparse.Namespace, named: set[str]) -> None:
    """UserError for an option that has no effect on what was asked for."""
    if arguments.record and (arguments.backend or arguments.traces):
        raise UserError("--record replays nothing: leave --backend and --traces out")
    if not arguments.record and (arguments.prompts or arguments.force):
        raise UserError(f"{'--prompts' if arguments.prompts else '--force'} is for --record")
    if arguments.device and not arguments.record and "reference" not in named:
        raise UserError("--device is for --record and --backend reference")


def _wanted(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """(back end, dtype) pairs; unknown names are refused before anything is opened."""
    named = {text.partition(":")[0] for text in arguments.backend or ()}
    _check_recording(arguments, named)
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
            raise UserError(f"dtype '{dtype}' has no tolerance (known: {', '.join(TOLERANCES)})")
        wanted.append((name, dtype))
    return wanted


def _exported(arguments: argparse.Namespace, adapter: BundledAdapter) -> list[tuple[str, str]]:
    """Exported functions, in their own dtype, where the bundle has some and no back end is named."""
    functions = adapter.mlxfn
    if arguments.backend or functions is None or functions.dtype not in TOLERANCES:
        return []
    return [("mlxfn", functions.dtype)] if arguments.dtype in (None, functions.dtype) else []


def golden_traces(
    bundle: Bundle, adapter: BundledAdapter, limit: int | None = None, backend: str = "mlx"
) -> tuple[list[Trace], Recorded | None]:
    """The adapter's traces for a back end (`golden_of`), and where they were made.

    Raises UserError when the bundle came without.
    """
    stem = golden_of(adapter, backend)
    if stem is None:
        raise UserError(
            f"{bundle.path}: adapter '{adapter.app}' has no golden traces; convert again where PyTorch "
            "is installed"
        )
    traces = load_traces(bundle.path / stem, bundle.manifest.architecture.vocab_size)[:limit]
    origin = trace_record(bundle.path / stem)
    bundle.check_unchanged()
    return traces, origin


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
    found: ReplayOutcome,
    options: dict | None = None,
) -> None:
    """Open the back end of `found` and replay `traces` on it, with a progress bar; fills `found`.

    options: of `open_backend`.
    """
    started, name = time.perf_counter(), f"{found.backend} {found.dtype}"
    with progress(len(traces) + 1, name) as advance:
        model = open_backend(found.backend, bundle, adapter, found.dtype, **(options or {}))
        advance(name)
        try:
            replay_traces(model, traces, found, advance=lambda _: advance(name))
        except UserError as error:
            raise UserError(f"adapter '{adapter.app}' on {found.backend}: {error}") from error
    found.seconds = time.perf_counter() - started
