"""`ss-validate`: replay golden traces on every back end of this machine, or record them."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path

from ss_device.bundle import Bundle, BundledAdapter, open_bundle
from ss_device.command_line import (
    DEVICES,
    CommandParser,
    console,
    device_help,
    positive,
    print_json,
    progress,
    run_command,
)
from ss_device.errors import UserError
from ss_device.settings import add_settings, setting, settings_of
from ss_device.trace import Recorded, Trace, load_traces, trace_record
from ss_runtime.backends import open_backend, why_not
from ss_runtime.commands.replay_table import origin_text, print_replays
from ss_runtime.coreai.asset import NO_FLOAT32, is_system_runtime
from ss_runtime.coreml.engines import COMPUTE_UNITS
from ss_runtime.recorded_traces import record_bundle, traces_of, weights_are_exact, why_not_replayed
from ss_runtime.settings import DTYPES, WITH_UNITS, RuntimeSettings, default_dtype
from ss_runtime.tokenization import BundleTokenizer, load_tokenizer
from ss_runtime.validation import TOLERANCES, ReplayOutcome, golden_of, has_exact_weights, replay_traces

DEFAULTS = (("mlx", "float32"), ("executor", "float32"), ("executor", "float16"))
OF_ASSETS = (("coreai", "float32"), ("coreai", "float16"))
RECORDING = "recording, with PyTorch on the bundle's own weights"


@dataclass(frozen=True)
class ReplaySettings:
    """What is replayed. backend: `NAME` or `NAME:DTYPE`; none: all that this machine can run."""

    adapter: str | None = setting(
        metavar="NAME", help="one adapter of the bundle (default: all with golden traces)"
    )
    backend: tuple[str, ...] = setting(
        (),
        metavar="NAME[:DTYPE]",
        help=f"{', '.join(DTYPES)}; may be repeated (default: all that this machine can run)",
    )
    dtype: str | None = setting(choices=sorted(TOLERANCES), help="dtype where NAME gives none")
    compute_units: str | None = setting(
        choices=tuple(COMPUTE_UNITS),
        help="engines that coreml may use, or coreai prefers (default all)",
    )
    limit: int | None = setting(parse=positive, help="only the first N prompts")
    traces: Path | None = setting(
        metavar="DIR", help="replay what --record wrote, not the bundle's own traces"
    )
    device: str | None = setting(
        choices=DEVICES,
        help=device_help("--record and --backend reference"),
    )

    def wanted(self) -> list[RuntimeSettings]:
        """The back ends by name; unknown ones are refused before anything is opened."""
        named = {text.partition(":")[0] for text in self.backend}
        if self.compute_units and not named & set(WITH_UNITS):
            raise UserError("--compute-units is for --backend coreml or coreai")
        if not self.backend:
            return [RuntimeSettings(b, d) for b, d in DEFAULTS if self.dtype in (None, d)]
        return [self._named(text) for text in self.backend]

    def _named(self, text: str) -> RuntimeSettings:
        name, _, dtype = text.partition(":")
        RuntimeSettings(name, dtype or self.dtype).check()
        dtype = dtype or self.dtype or default_dtype(name)
        if dtype not in TOLERANCES:
            raise UserError(f"dtype '{dtype}' has no tolerance (known: {', '.join(TOLERANCES)})")
        own = {name: {"compute_units": self.compute_units} for name in WITH_UNITS}
        own["reference"] = {"device": self.device}
        return RuntimeSettings(name, dtype, **own.get(name, {}))

    def of_bundle(self, adapter: BundledAdapter) -> list[RuntimeSettings]:
        """Back ends of what only some bundles hold, where no back end is named.

        Assets in both dtypes, exported functions in their own.
        """
        if self.backend:
            return []
        found = [RuntimeSettings(b, d) for b, d in OF_ASSETS if adapter.coreai and self.dtype in (None, d)]
        functions = adapter.mlxfn
        if functions and functions.dtype in TOLERANCES and self.dtype in (None, functions.dtype):
            found.append(RuntimeSettings("mlxfn", functions.dtype))
        return found


@dataclass(frozen=True)
class RecordSettings:
    """Where traces are recorded to, and of what."""

    record: Path | None = setting(metavar="DIR", group=RECORDING, help="write traces, replay nothing")
    prompts: Path | None = setting(
        metavar="FILE",
        group=RECORDING,
        help="JSON lines with 'prompt' or the application's fields (default: the bundle's golden prompts)",
    )
    force: bool = setting(False, group=RECORDING, help="replace existing traces")

    def check(self, asked: ReplaySettings) -> None:
        """UserError for an option that has no effect on what was asked for."""
        if self.record and (asked.backend or asked.traces):
            raise UserError("--record replays nothing: leave --backend and --traces out")
        if not self.record and (self.prompts or self.force):
            raise UserError(f"{'--prompts' if self.prompts else '--force'} is for --record")
        named = {text.partition(":")[0] for text in asked.backend}
        if asked.device and not self.record and "reference" not in named:
            raise UserError("--device is for --record and --backend reference")


def main(argv: list[str] | None = None) -> int:
    """Entry point of `ss-validate`.

    → the exit code: 0 where every adapter was compared on some back end and every comparison passes; 1
    where one does not, be it that a replay came to no comparison; 2 for bad input: a damaged bundle, no or
    damaged golden traces, an adapter that no back end here can run.
    """
    return run_command(_parser(), validate_command, argv)


def _parser() -> CommandParser:
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
    add_settings(parser, ReplaySettings)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_settings(parser, RecordSettings)
    return parser


def validate_command(arguments: argparse.Namespace) -> int:
    """Body of the command."""
    asked, recording = settings_of(arguments, ReplaySettings), settings_of(arguments, RecordSettings)
    recording.check(asked)
    wanted = asked.wanted()
    bundle = open_bundle(arguments.bundle, verify=True)
    names = [asked.adapter] if asked.adapter else sorted(bundle.manifest.adapters)
    if not names:
        raise UserError(f"{bundle.path}: no adapter in this bundle, so nothing to replay")
    if recording.record:
        return _record(bundle, names, asked, recording, arguments.json)
    return _replay(bundle, names, asked, wanted, arguments.json)


def _replay(
    bundle: Bundle,
    names: list[str],
    asked: ReplaySettings,
    wanted: list[RuntimeSettings],
    as_json: bool,
) -> int:
    """Replay every adapter's traces on the back ends and print what differs."""
    tokenizer = load_tokenizer(bundle)
    left_out: list[dict] = []
    replays = {
        name: _validate_adapter(bundle, bundle.adapter(name), asked, wanted, tokenizer, left_out)
        for name in names
    }
    passed = not any(r.failures for found in replays.values() for r in found)
    if as_json:
        results = [{"adapter": n, **r.to_dict()} for n, found in replays.items() for r in found]
        where = str(bundle.path)
        print_json({"bundle": where, "passed": passed, "results": results, "left_out": left_out})
    else:
        for name, found in replays.items():
            print_replays(name, found)
        for entry in left_out:
            console().print(f"left out: {entry['backend']} ({entry['reason']})", markup=False)
    return 0 if passed else 1


def _record(
    bundle: Bundle, names: list[str], asked: ReplaySettings, settings: RecordSettings, as_json: bool
) -> int:
    """Record the adapters' traces and print what was recorded."""
    recordings = record_bundle(
        bundle,
        [bundle.adapter(name).app for name in names],
        settings.record,
        asked.dtype or "float32",
        asked.device,
        settings.prompts,
        asked.limit,
        settings.force,
    )
    if as_json:
        found = [recording.to_dict() for recording in recordings]
        print_json({"bundle": str(bundle.path), "traces": str(settings.record), "recorded": found})
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
    bundle: Bundle,
    adapter: BundledAdapter,
    asked: ReplaySettings,
    wanted: list[RuntimeSettings],
    tokenizer: BundleTokenizer,
    left_out: list[dict],
) -> list[ReplayOutcome]:
    """An adapter on every back end; those that this machine cannot run go to `left_out`, but not all."""
    name, replays, missing = adapter.app, [], []
    for settings in [*wanted, *asked.of_bundle(adapter)]:
        backend, dtype = settings.backend, settings.dtype
        reason = why_not(backend, bundle, adapter)
        if reason is None and (backend, dtype) == ("coreai", "float32") and is_system_runtime():
            reason = NO_FLOAT32
        if asked.traces is None:
            traces, origin = golden_traces(bundle, adapter, asked.limit, backend)
            exact = has_exact_weights(bundle, adapter, backend)
        else:
            traces, origin = traces_of(bundle, adapter, asked.traces, asked.limit)
            exact = weights_are_exact(bundle, backend, origin)
            reason = reason or why_not_replayed(bundle, adapter, backend)
        check_prompts(traces, tokenizer, adapter)
        if reason is None:
            found = ReplayOutcome(backend, dtype, exact, origin)
            validate_backend(bundle, adapter, traces, found, settings)
            replays.append(found)
        elif asked.backend:
            raise UserError(f"back end '{backend}': {reason}")
        else:
            missing.append({"adapter": name, "backend": f"{backend}:{dtype}", "reason": reason})
    if not replays:
        reasons = "; ".join(f"{entry['backend']}: {entry['reason']}" for entry in missing)
        raise UserError(f"adapter '{name}': nothing can be compared here ({reasons})")
    left_out += missing
    return replays


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
    settings: RuntimeSettings | None = None,
) -> None:
    """Open the back end of `found` and replay `traces` on it, with a progress bar; fills `found`."""
    settings = replace(settings or RuntimeSettings(), backend=found.backend, dtype=found.dtype)
    started, name = time.perf_counter(), f"{found.backend} {found.dtype}"
    with progress(len(traces) + 1, name) as advance:
        model = open_backend(bundle, adapter, settings)
        advance(name)
        try:
            replay_traces(model, traces, found, advance=lambda _: advance(name))
        except UserError as error:
            raise UserError(f"adapter '{adapter.app}' on {found.backend}: {error}") from error
    found.seconds = time.perf_counter() - started
