"""`ss-bench`: measure methods side by side, compare results, choose the draft for this device."""

from __future__ import annotations

import argparse
import os
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
from ss_device.step_model import StepLimits
from ss_runtime.backends import (
    DTYPES,
    KV_BITS,
    blas_threads,
    default_dtype,
    fastest_stream_rows,
    load_openblas,
    open_backend,
)
from ss_runtime.bench import report
from ss_runtime.bench.cost_table import tuning_costs
from ss_runtime.bench.device_memory import MemoryLedger
from ss_runtime.bench.plots import check_plot_file, plot_applications, plot_result
from ss_runtime.bench.recorded_ranks import path_shares
from ss_runtime.tokenization import load_tokenizer
from ss_runtime.tuning import FILE, device_name, write_tuning

APP = "{app}"


def main(argv: list[str] | None = None) -> int:
    """Entry point of `ss-bench`; returns the exit code."""
    return run_command(_parser(), _run, argv)


def _run(arguments: argparse.Namespace) -> None:
    """The command's body, once per adapter where the input's name holds `{app}`."""
    if APP not in str(getattr(arguments, "input", "")):
        return arguments.body(arguments)
    paths = [name for name in ("input", "output", "plot") if getattr(arguments, name, None)]
    for name in paths:
        if APP not in str(getattr(arguments, name)):
            raise UserError(f"--{name} {getattr(arguments, name)}: needs {APP} in it, as --input has")
    bundle = open_bundle(arguments.bundle)
    each = [arguments.adapter] if arguments.adapter else sorted(bundle.manifest.adapters)
    for app in each:
        own = {name: Path(str(getattr(arguments, name)).replace(APP, app)) for name in paths}
        own_arguments = argparse.Namespace(**{**vars(arguments), **own, "adapter": app})
        if not arguments.json and len(each) > 1:
            print(f"\n## {app}\n", flush=True)
        own_arguments.body(own_arguments)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="ss-bench",
        description="Measure decoding methods side by side on this device. Close other programs first.",
        example="ss-bench run build/sqlctx --input test.jsonl --limit 100 --output build/bench.json",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)
    run = commands.add_parser("run", help="methods interleaved over the same prompts")
    _shared(run, needs_input=True)
    run.add_argument(
        "--methods", default="plain,ss,ss-lookup,prompt-lookup", metavar="LIST",
        help="comma-separated: plain, ss, ss-lookup, ss-tuned, prompt-lookup (this runtime), mlx-lm, "
        "mlx-lm-draft, hf, hf-prompt-lookup, hf-assisted (default: %(default)s)",
    )  # fmt: skip
    run.add_argument("--base", type=Path, metavar="DIR", help="the base's Hugging Face folder, for mlx-lm")
    run.add_argument(
        "--draft", type=Path, metavar="DIR", help="a small model's folder, for draft-model methods"
    )
    run.add_argument(
        "--draft-tokens", type=positive, default=2, metavar="K",
        help="tokens that mlx-lm-draft's small model writes ahead (default: %(default)s, mlx-lm's own)",
    )  # fmt: skip
    run.add_argument(
        "--kv-bits", type=int, choices=KV_BITS, help="keep keys and values in 4 or 8 bits (our methods)"
    )
    run.add_argument("--repeat", type=positive, default=1, metavar="N", help="rounds over the prompts")
    run.add_argument("--output", type=Path, metavar="FILE", help="write JSON here and Markdown beside it")
    run.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (needs matplotlib)")
    run.add_argument("--force", action="store_true", help="replace existing files")
    run.set_defaults(body=run_methods)
    tune = commands.add_parser("tune", help=f"choose nodes and shape for this device, write {FILE}")
    _shared(tune, needs_input=False)
    tune.add_argument("--rounds", type=positive, default=9, metavar="N", help="timed steps per tree size")
    tune.set_defaults(body=tune_bundle)
    compare = commands.add_parser("compare", help="two results of `ss-bench run`")
    compare.add_argument("before", type=Path, metavar="A.json")
    compare.add_argument("after", type=Path, metavar="B.json")
    compare.add_argument("--json", action="store_true", help="print one JSON object")
    compare.set_defaults(body=compare_results)
    plot = commands.add_parser("plot", help="applications side by side, and time against nodes")
    plot.add_argument("results", type=Path, nargs="+", metavar="A.json", help="results of `ss-bench run`")
    plot.add_argument("--tuning", type=Path, metavar="FILE", help=f"a bundle's {FILE}: draw its step times")
    plot.add_argument("--output", type=Path, required=True, metavar="FILE", help="the picture's name")
    plot.add_argument("--force", action="store_true", help="replace an existing picture")
    plot.set_defaults(body=plot_results)
    return parser


def _shared(parser: argparse.ArgumentParser, needs_input: bool) -> None:
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="bundle folder made by ss-convert")
    add("--adapter", metavar="NAME", help="which of the bundle's adapters (default: the only one)")
    add(
        "--input",
        type=Path,
        required=needs_input,
        metavar="FILE",
        help="JSON lines with prompts or rows; "
        "{app} stands for the name of every adapter of the bundle in turn (in --output and --plot too)"
        + ("" if needs_input else "; without: the adapter's recorded rank statistics are used"),
    )
    add("--limit", type=positive, metavar="N", help="only the first N rows")
    add("--max-tokens", type=positive, metavar="N", help="default: the application's")
    add("--dtype", choices=DTYPES["mlx"], help="dtype (default: what suits this machine)")
    add("--json", action="store_true", help="print one JSON object")


def _open(arguments: argparse.Namespace) -> tuple[Bundle, BundledAdapter, list[list[int]], int, str]:
    """Bundle, adapter, prompt ids, token limit, dtype; what does not fit is refused here."""
    bundle = open_bundle(arguments.bundle)
    adapter = bundle.adapter(arguments.adapter)
    tokenizer = load_tokenizer(bundle)
    file = arguments.input
    texts = prompts_from_file(file, adapter.prompt, arguments.limit) if file else []
    max_tokens = arguments.max_tokens or adapter.max_tokens
    limits = StepLimits(
        adapter.num_nodes, adapter.num_nodes, 0, bundle.manifest.architecture.default_context
    )
    prompts: list[list[int]] = []
    for _, text in texts:
        with row_errors(file, len(prompts)):
            prompts.append(tokenizer.encode(text))
            check_request(limits, 1, len(prompts[-1]), max_tokens)
    load_openblas()
    return bundle, adapter, prompts, max_tokens, arguments.dtype or default_dtype("mlx")


def run_methods(arguments: argparse.Namespace) -> None:
    """Body of `run`."""
    from ss_runtime.bench import measurement, methods

    names = [name.strip() for name in arguments.methods.split(",")]
    if unknown := [name for name in names if name not in methods.METHODS]:
        raise UserError(f"unknown method '{unknown[0]}' (known: {', '.join(methods.METHODS)})")
    _check_outputs(arguments)
    bundle, adapter, prompts, max_tokens, dtype = _open(arguments)
    folders = arguments.base, arguments.draft
    setting = methods.Setting(bundle, adapter, dtype, *folders, arguments.draft_tokens, arguments.kv_bits)
    memory, opened = MemoryLedger(), {}
    for name in dict.fromkeys(names):
        with memory.account(name, counted=False):
            opened[name] = methods.open_method(name, setting)
    with progress(len(prompts) * len(opened) * arguments.repeat, "measuring") as advance:
        series = measurement.interleave(opened, prompts, max_tokens, arguments.repeat, advance, memory)
    result = {
        "format_version": report.FORMAT_VERSION,
        "version": program_version(),
        "device": device_name(),
        "dtype": dtype,
        "blas_threads": blas_threads(),
        "kv_bits": arguments.kv_bits,
        "adapter": adapter.app,
        "base": bundle.manifest.base.name,
        "prompts": len(prompts),
        "max_tokens": max_tokens,
        "load_average": list(os.getloadavg()),
        "run_columns": list(measurement.RUN_COLUMNS),
        "methods": measurement.summarize(series),
    }
    if arguments.output:
        report.write_result(result, arguments.output)
    if arguments.plot:
        plot_result(result, arguments.plot)
    _show(result, report.markdown(result), arguments.json)


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Refuse what could not be written in the end; folders of results are made."""
    for path in filter(None, (arguments.output, arguments.plot)):
        path.parent.mkdir(parents=True, exist_ok=True)
        check_new_file(path, arguments.force)
    if arguments.plot:
        check_plot_file(arguments.plot)


def tune_bundle(arguments: argparse.Namespace) -> None:
    """Body of `tune`."""
    bundle, adapter, prompts, max_tokens, dtype = _open(arguments)
    from ss_runtime.bench import tuner

    rows, kept = fastest_stream_rows(adapter, adapter.num_nodes), adapter.num_nodes
    if not prompts:
        path_shares(adapter.rank_statistics, f"adapter '{adapter.app}'")  # before anything is loaded
    model = open_backend("mlx", bundle, adapter, dtype, rows, num_kept=kept)
    bias, prunes = bundle.bigram_bias(adapter), bool(adapter.config.pruning_rank)
    if not prompts:
        choice, evidence = tuner.tune_by_ranks(
            model, bias, adapter.rank_statistics, arguments.rounds, prunes
        )
    else:
        stop_ids = frozenset(bundle.manifest.architecture.eos_ids)
        total = len(prompts) + len(tuner.candidates(adapter.num_nodes, adapter.config.num_streams)) + 1
        with progress(total, "tuning") as advance:
            choice, evidence = tuner.tune(
                model, bias, prompts, max_tokens, stop_ids, arguments.rounds, advance, prunes
            )
    write_tuning(bundle, adapter.app, dtype, choice, evidence)
    text = report.tuning_markdown(evidence) + f"\nchosen: {choice.label()} (in {bundle.path / FILE})"
    _show({"choice": choice.label(), "evidence": evidence}, text, arguments.json)


def compare_results(arguments: argparse.Namespace) -> None:
    """Body of `compare`."""
    compared = report.compare(report.read_result(arguments.before), report.read_result(arguments.after))
    _show(compared, report.comparison_markdown(compared), arguments.json)


def plot_results(arguments: argparse.Namespace) -> None:
    """Body of `plot`. An application's label is its file's name."""
    check_new_file(arguments.output, arguments.force)
    check_plot_file(arguments.output)
    results: dict[str, dict] = {}
    for path in arguments.results:
        label = path.stem.removeprefix("benchmark_")
        if label in results:
            raise UserError(f"{path}: two results are named '{label}'")
        results[label] = report.read_result(path)
    costs = tuning_costs(arguments.tuning) if arguments.tuning else {}
    plot_applications(results, costs, arguments.output)


def _show(result: dict, text: str, as_json: bool) -> None:
    if as_json:
        print_json(result)
    elif console().is_terminal:
        console().print(Markdown(text))
    else:
        print(text, end="" if text.endswith("\n") else "\n")
