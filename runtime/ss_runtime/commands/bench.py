"""`ss-bench`: measure methods side by side, compare results, choose the draft for this device."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.markdown import Markdown

from ss_device.bundle import Bundle, BundledAdapter, open_bundle
from ss_device.command_line import (
    CommandParser,
    console,
    positive,
    print_json,
    program_version,
    progress,
    prompts_from_file,
    row_errors,
    run_command,
)
from ss_device.decoding import check_request
from ss_device.errors import UserError
from ss_device.outputs import check_new_file
from ss_device.settings import add_settings, settings_of
from ss_device.step_model import StepLimits
from ss_runtime.backends import blas_threads, open_backend
from ss_runtime.bench import report
from ss_runtime.bench.cost_table import tuning_costs
from ss_runtime.bench.device_memory import MemoryLedger
from ss_runtime.bench.plots import check_plot_file, plot_applications, plot_result
from ss_runtime.bench.recorded_ranks import path_shares
from ss_runtime.bench.settings import BenchPrompts, BenchSettings
from ss_runtime.settings import RuntimeSettings, add_backend, default_dtype, functions_of
from ss_runtime.tokenization import load_tokenizer
from ss_runtime.tuning import FILE, device_name, write_tuning

APP = "{app}"


@dataclass(frozen=True)
class BenchWork:
    """A bundle's adapter with prompts that fit it."""

    bundle: Bundle
    adapter: BundledAdapter
    prompts: list[list[int]]
    max_tokens: int
    runtime: RuntimeSettings

    @property
    def dtype(self) -> str:
        return self.runtime.dtype


def main(argv: list[str] | None = None) -> int:
    """Entry point of `ss-bench`; returns the exit code."""
    return run_command(_parser(), lambda arguments: arguments.body(arguments), argv)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="ss-bench",
        description="Measure decoding methods side by side on this device. Close other programs first.",
        example="ss-bench run build/sqlctx --input test.jsonl --limit 100 --output build/bench.json",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)
    run = commands.add_parser("run", help="methods interleaved over the same prompts")
    _add_work(run)
    add_backend(run)
    add_settings(run, RuntimeSettings, only=("dtype", "compute_units", "kv_bits"))
    add_settings(run, BenchSettings)
    run.set_defaults(body=_run)
    tune = commands.add_parser("tune", help=f"choose nodes and shape for this device, write {FILE}")
    _add_work(tune)
    add_settings(tune, RuntimeSettings, only=("dtype",))
    tune.add_argument("--rounds", type=positive, default=9, metavar="N", help="timed steps per tree size")
    tune.set_defaults(body=_tune)
    compare = commands.add_parser("compare", help="two results of `ss-bench run`")
    compare.add_argument("before", type=Path, metavar="A.json")
    compare.add_argument("after", type=Path, metavar="B.json")
    compare.add_argument("--json", action="store_true", help="print one JSON object")
    compare.set_defaults(body=lambda a: compare_results(a.before, a.after, a.json))
    _add_plot(commands)
    return parser


def _add_work(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="bundle folder made by ss-convert")
    add_settings(parser, BenchPrompts)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_plot(commands) -> None:
    plot = commands.add_parser("plot", help="applications side by side, and time against nodes")
    plot.add_argument("results", type=Path, nargs="+", metavar="A.json", help="results of `ss-bench run`")
    plot.add_argument("--tuning", type=Path, metavar="FILE", help=f"a bundle's {FILE}: draw its step times")
    plot.add_argument("--output", type=Path, required=True, metavar="FILE", help="the picture's name")
    plot.add_argument("--force", action="store_true", help="replace an existing picture")
    plot.set_defaults(body=lambda a: plot_results(a.results, a.output, a.tuning, a.force))


def _run(arguments: argparse.Namespace) -> None:
    """`run`, once per adapter where the input's name holds `{app}`."""
    asked, settings = settings_of(arguments, BenchPrompts), settings_of(arguments, BenchSettings)
    if asked.input is None:
        raise UserError("run needs --input FILE (see ss-bench run --help)")
    runtime = settings_of(arguments, RuntimeSettings)
    for prompts, own in _by_adapter(arguments.bundle, asked, settings, arguments.json):
        run_methods(arguments.bundle, prompts, runtime, own, arguments.json)


def _tune(arguments: argparse.Namespace) -> None:
    """`tune`, once per adapter where the input's name holds `{app}`."""
    asked, runtime = settings_of(arguments, BenchPrompts), settings_of(arguments, RuntimeSettings)
    for prompts, _ in _by_adapter(arguments.bundle, asked, BenchSettings(), arguments.json):
        tune_bundle(arguments.bundle, prompts, runtime, arguments.rounds, arguments.json)


def _by_adapter(
    bundle: Path, prompts: BenchPrompts, settings: BenchSettings, as_json: bool
) -> Iterator[tuple[BenchPrompts, BenchSettings]]:
    """The settings of each adapter in turn; a heading is printed above each of several."""
    if APP not in str(prompts.input):
        yield prompts, settings
        return
    files = {name: getattr(settings, name) for name in ("output", "plot") if getattr(settings, name)}
    for name, file in files.items():
        if APP not in str(file):
            raise UserError(f"--{name} {file}: needs {APP} in it, as --input has")
    names = [prompts.adapter] if prompts.adapter else sorted(open_bundle(bundle).manifest.adapters)
    for app in names:
        if not as_json and len(names) > 1:
            print(f"\n## {app}\n", flush=True)
        own = {name: Path(str(file).replace(APP, app)) for name, file in files.items()}
        file = Path(str(prompts.input).replace(APP, app))
        yield replace(prompts, input=file, adapter=app), replace(settings, **own)


def _open(path: Path, asked: BenchPrompts, runtime: RuntimeSettings) -> BenchWork:
    """Bundle, adapter and prompts; what does not fit is refused here."""
    runtime = replace(runtime, backend=runtime.backend or "mlx")
    runtime = replace(runtime, dtype=runtime.dtype or default_dtype(runtime.backend))
    runtime.check()
    bundle = open_bundle(path)
    adapter = bundle.adapter(asked.adapter)
    tokenizer = load_tokenizer(bundle)
    texts = prompts_from_file(asked.input, adapter.prompt, asked.limit) if asked.input else []
    max_tokens = asked.max_tokens or adapter.max_tokens
    functions = functions_of(runtime.backend, adapter)
    context = functions.context if functions else bundle.manifest.architecture.default_context
    limits = StepLimits(adapter.num_nodes, adapter.num_nodes, 0, context)
    prompts: list[list[int]] = []
    for _, text in texts:
        with row_errors(asked.input, len(prompts)):
            prompts.append(tokenizer.encode(text))
            check_request(limits, 1, len(prompts[-1]), max_tokens)
    return BenchWork(bundle, adapter, prompts, max_tokens, runtime)


def run_methods(
    bundle: Path, asked: BenchPrompts, runtime: RuntimeSettings, settings: BenchSettings, as_json: bool
) -> None:
    """Measure methods over the same prompts; print the result and write it where the settings say."""
    names = settings.method_names()
    settings.check_outputs()
    work = _open(bundle, asked, runtime)
    result = _measured(work, names, settings)
    if settings.output:
        report.write_result(result, settings.output)
    if settings.plot:
        plot_result(result, settings.plot)
    _show(result, report.markdown(result), as_json)


def _measured(work: BenchWork, names: list[str], settings: BenchSettings) -> dict:
    """The result of `run` as JSON."""
    from ss_runtime.bench import measurement, methods

    shared = methods.Setting(
        work.bundle, work.adapter, work.runtime, settings.base, settings.draft, settings.draft_tokens
    )
    on_mlx = [name for name in names if methods.uses_mlx(name, work.runtime.backend)]
    threads = blas_threads() if on_mlx else None  # loaded before MLX is
    memory, opened = MemoryLedger(on_mlx), {}
    for name in names:
        with memory.account(name, counted=False):
            opened[name] = methods.open_method(name, shared)
    with progress(len(work.prompts) * len(opened) * settings.repeat, "measuring") as advance:
        series = measurement.interleave(
            opened, work.prompts, work.max_tokens, settings.repeat, advance, memory
        )
    return {
        "format_version": report.FORMAT_VERSION,
        "version": program_version(),
        "device": device_name(),
        "backend": work.runtime.backend,
        "dtype": work.dtype,
        "compute_units": work.runtime.compute_units,
        "blas_threads": threads,
        "kv_bits": work.runtime.kv_bits,
        "adapter": work.adapter.app,
        "base": work.bundle.manifest.base.name,
        "prompts": len(work.prompts),
        "max_tokens": work.max_tokens,
        "load_average": list(os.getloadavg()),
        "run_columns": list(measurement.RUN_COLUMNS),
        "methods": measurement.summarize(series),
    }


def tune_bundle(
    bundle: Path, asked: BenchPrompts, runtime: RuntimeSettings, rounds: int, as_json: bool
) -> None:
    """Choose the draft for this device and write it into the bundle. rounds: timed steps per tree size."""
    work = _open(bundle, asked, runtime)
    adapter = work.adapter
    if not work.prompts:
        path_shares(adapter.rank_statistics, f"adapter '{adapter.app}'")  # before anything is loaded
    choice, evidence = _tuned(work, rounds)
    write_tuning(work.bundle, adapter.app, work.dtype, choice, evidence)
    text = report.tuning_markdown(evidence) + f"\nchosen: {choice.label()} (in {work.bundle.path / FILE})"
    _show({"choice": choice.label(), "evidence": evidence}, text, as_json)


def _tuned(work: BenchWork, rounds: int):
    """(choice, evidence) of `bench.tuner`: by prompts, or by rank statistics where there are none."""
    from ss_runtime.bench import tuner

    bundle, adapter = work.bundle, work.adapter
    model = open_backend(bundle, adapter, replace(work.runtime, num_kept=adapter.num_nodes))
    bias, prunes = bundle.bigram_bias(adapter), bool(adapter.config.pruning_rank)
    if not work.prompts:
        return tuner.tune_by_ranks(model, bias, adapter.rank_statistics, rounds, prunes)
    stop_ids = frozenset(bundle.manifest.architecture.eos_ids)
    total = len(work.prompts) + len(tuner.candidates(adapter.num_nodes, adapter.config.num_streams)) + 1
    with progress(total, "tuning") as advance:
        return tuner.tune(model, bias, work.prompts, work.max_tokens, stop_ids, rounds, advance, prunes)


def compare_results(before: Path, after: Path, as_json: bool) -> None:
    """Print what changed between two results."""
    compared = report.compare(report.read_result(before), report.read_result(after))
    _show(compared, report.comparison_markdown(compared), as_json)


def plot_results(files: list[Path], output: Path, tuning: Path | None, force: bool) -> None:
    """Draw results side by side. An application's label is its file's name."""
    check_new_file(output, force)
    check_plot_file(output)
    results: dict[str, dict] = {}
    for path in files:
        label = path.stem.removeprefix("benchmark_")
        if label in results:
            raise UserError(f"{path}: two results are named '{label}'")
        results[label] = report.read_result(path)
    plot_applications(results, tuning_costs(tuning) if tuning else {}, output)


def _show(result: dict, text: str, as_json: bool) -> None:
    if as_json:
        print_json(result)
    elif console().is_terminal:
        console().print(Markdown(text))
    else:
        print(text, end="" if text.endswith("\n") else "\n")
