"""`ss-bench`: measure methods side by side, compare results, choose the draft for this device."""

from __future__ import annotations

import argparse
import json
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
    run_command,
)
from ss_device.decoding import StepLimits, check_request
from ss_device.errors import UserError
from ss_runtime.backends import (
    DTYPES,
    KV_BITS,
    default_dtype,
    fastest_stream_rows,
    load_openblas,
    open_backend,
)
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
    _shared(run)
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
        "--kv-bits", type=int, choices=KV_BITS, help="keep keys and values in 4 or 8 bits (our methods)"
    )
    run.add_argument("--repeat", type=positive, default=1, metavar="N", help="rounds over the prompts")
    run.add_argument("--output", type=Path, metavar="FILE", help="write JSON here and Markdown beside it")
    run.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG (needs matplotlib)")
    run.set_defaults(body=run_methods)
    tune = commands.add_parser("tune", help=f"choose nodes and shape for this device, write {FILE}")
    _shared(tune)
    tune.add_argument("--rounds", type=positive, default=9, metavar="N", help="timed steps per tree size")
    tune.set_defaults(body=tune_bundle)
    compare = commands.add_parser("compare", help="two results of `ss-bench run`")
    compare.add_argument("before", type=Path, metavar="A.json")
    compare.add_argument("after", type=Path, metavar="B.json")
    compare.set_defaults(body=compare_results)
    return parser


def _shared(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="bundle folder made by ss-convert")
    add("--adapter", metavar="NAME", help="which of the bundle's adapters (default: the only one)")
    add(
        "--input",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON lines with prompts or rows; "
        "with {app} in it: every adapter of the bundle, its name put there (in --output and --plot too)",
    )
    add("--limit", type=positive, metavar="N", help="only the first N rows")
    add("--max-tokens", type=positive, metavar="N", help="default: the application's")
    add("--dtype", choices=DTYPES["mlx"], help="arithmetic (default: what suits this machine)")
    add("--json", action="store_true", help="print one JSON object")


def _open(arguments: argparse.Namespace) -> tuple[Bundle, BundledAdapter, list[list[int]], int, str]:
    """Bundle, adapter, prompt ids, token limit, arithmetic; what does not fit is refused here."""
    bundle = open_bundle(arguments.bundle)
    adapter = bundle.adapter(arguments.adapter)
    tokenizer = load_tokenizer(bundle)
    texts = prompts_from_file(arguments.input, adapter.prompt, arguments.limit)
    prompts = [tokenizer.encode(text) for _, text in texts]
    max_tokens = arguments.max_tokens or adapter.max_tokens
    limits = StepLimits(
        adapter.num_nodes, adapter.num_nodes, 0, bundle.manifest.architecture.default_context
    )
    for prompt in prompts:
        check_request(limits, 1, len(prompt), max_tokens)
    load_openblas()
    return bundle, adapter, prompts, max_tokens, arguments.dtype or default_dtype("mlx")


def run_methods(arguments: argparse.Namespace) -> None:
    """Body of `run`."""
    from ss_runtime.bench import measurement, methods, report

    names = [name.strip() for name in arguments.methods.split(",")]
    if unknown := [name for name in names if name not in methods.METHODS]:
        raise UserError(f"unknown method '{unknown[0]}' (known: {', '.join(methods.METHODS)})")
    bundle, adapter, prompts, max_tokens, dtype = _open(arguments)
    setting = methods.Setting(bundle, adapter, dtype, arguments.base, arguments.draft, arguments.kv_bits)
    opened = {name: methods.open_method(name, setting) for name in dict.fromkeys(names)}
    with progress(len(prompts) * len(opened) * arguments.repeat, "measuring") as advance:
        series = measurement.interleave(opened, prompts, max_tokens, arguments.repeat, advance)
    result = {
        "format_version": report.FORMAT_VERSION,
        "version": program_version(),
        "device": device_name(),
        "dtype": dtype,
        "kv_bits": arguments.kv_bits,
        "adapter": adapter.app,
        "base": bundle.manifest.base.name,
        "prompts": len(prompts),
        "max_tokens": max_tokens,
        "load_average": list(os.getloadavg()),
        "methods": measurement.summarize(series),
    }
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
        arguments.output.with_suffix(".md").write_text(report.markdown(result))
    if arguments.plot:
        report.plot(result, arguments.plot)
    _show(result, report.markdown(result), arguments.json)


def tune_bundle(arguments: argparse.Namespace) -> None:
    """Body of `tune`."""
    from ss_runtime.bench import tuner

    bundle, adapter, prompts, max_tokens, dtype = _open(arguments)

    model = open_backend("mlx", bundle, adapter, dtype, fastest_stream_rows(adapter, adapter.num_nodes))
    total = len(prompts) + len(tuner.candidates(adapter.num_nodes, adapter.config.num_streams)) + 1
    with progress(total, "tuning") as advance:
        choice, evidence = tuner.tune(
            model,
            bundle.parent_bias(adapter),
            prompts,
            max_tokens,
            frozenset(bundle.manifest.architecture.eos_ids),
            arguments.rounds,
            advance,
        )
    write_tuning(bundle, adapter.app, dtype, choice, evidence)
    lines = ["| draft | tokens per call | call ms | drafting ms | predicted tok/s |", "|---" * 5 + "|"]
    for found in sorted(evidence, key=lambda e: -e["tokens_per_second"]):
        times = f"{1000 * found['step_seconds']:.2f} | {1000 * found['draft_seconds']:.2f}"
        lines.append(
            f"| {found['draft']} | {found['tokens_per_call']:.2f} | {times} "
            f"| {found['tokens_per_second']:.1f} |"
        )
    text = "\n".join([*lines, "", f"chosen: {choice.label()} (in {bundle.path / FILE})"])
    _show({"choice": choice.label(), "evidence": evidence}, text, arguments.json)


def compare_results(arguments: argparse.Namespace) -> None:
    """Body of `compare`."""
    from ss_runtime.bench import report

    print(report.compare(report.read_result(arguments.before), report.read_result(arguments.after)), end="")


def _show(result: dict, text: str, as_json: bool) -> None:
    if as_json:
        print_json(result)
    elif console().is_terminal:
        console().print(Markdown(text))
    else:
        print(text, end="" if text.endswith("\n") else "\n")
