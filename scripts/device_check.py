"""What a GPU has to show before anything is said of it: the reference on it against the CPU, and its speed.

python -m scripts.device_check --adapter models/adapters/sqlctx --base models/base/ss-demo-base

Golden traces (float32, replayed by every back end that is here), `evaluate`, `replay` and `distill` are
compared with the CPU of the same machine. Then speed: plain decoding (the step model's and Hugging Face's)
against drafts in float32 and bfloat16, in one interleaved run, and training in fp32, bf16 and over a base
in NF4, with the GPU's peak memory. Rows come from the application's `demo.jsonl` unless `--data` is given.
A check that fails does not stop the others; the exit code is then 1.
"""

from __future__ import annotations

import json
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

import numpy as np
import torch
from rich.box import SIMPLE
from rich.table import Table
from transformers.utils import logging

from ss_convert.command import main as ss_convert
from ss_device.adapter import Adapter, load_adapter
from ss_device.application import Application, load_application
from ss_device.base_model import BaseFolder, open_base
from ss_device.bundle import open_bundle
from ss_device.command_line import CommandParser, add_device, console, positive, print_json, run_command
from ss_device.decoding import Drafter, decode
from ss_device.draft_choice import DraftChoice
from ss_device.errors import UserError
from ss_device.evaluation.prompts import fitting_prompts
from ss_device.evaluation.replay_report import replay_adapter
from ss_device.evaluation.report import evaluate_adapter
from ss_device.evaluation.settings import (
    EvaluationSettings,
    PromptSettings,
    ReplaySettings,
)
from ss_device.outputs import check_new_file, write_text
from ss_device.reference.device import chosen_device, device_text
from ss_device.reference.step_model import ReferenceStepModel
from ss_device.reference.stream_model import load_stream_model
from ss_device.tokenizer_file import read_tokenizer
from ss_device.training.adapt import AdapterSettings, fit_adapter
from ss_device.training.continuations import continuations
from ss_device.training.examples import encode_examples, load_prompts
from ss_device.training.schedule import AdapterSchedule
from ss_device.training.settings import Continuation, RunOptions
from ss_runtime.backends import why_not
from ss_runtime.commands.validate import DEFAULTS, validate_backend
from ss_runtime.recorded_traces import record_bundle, traces_of, weights_are_exact
from ss_runtime.settings import DTYPES, RuntimeSettings
from ss_runtime.validation import ReplayOutcome

NODES = 32
TRAININGS = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "nf4": {"quantize_base": "nf4"},
}


@dataclass(frozen=True)
class Setting:
    """What the checks share. folder: for what they write; tokens: generated per prompt at most."""

    device: torch.device
    adapter: Adapter
    adapter_folder: Path
    app: Application
    base: BaseFolder
    data: Path
    limit: int
    rounds: int
    tokens: int
    folder: Path

    def prompts(self) -> list[list[int]]:
        """Token ids."""
        tokenizer, shape = read_tokenizer(self.base.path), self.base.architecture
        settings = PromptSettings(self.limit, self.tokens)
        return fitting_prompts(self.app, self.data, settings, tokenizer, shape).ids


def golden_traces(setting: Setting) -> dict:
    """Recorded on the device, replayed here: prompts that are token-exact, by back end."""
    bundle_folder, traces_folder = setting.folder / "bundle", setting.folder / "traces"
    words = ["--adapter", setting.adapter_folder, "--base", setting.base.path, "--output", bundle_folder]
    with redirect_stdout(StringIO()):
        status = ss_convert([*map(str, words), "--nodes", str(NODES), "--no-golden", "--json"])
    if status:
        raise UserError(f"ss-convert ended with {status}")
    bundle = open_bundle(bundle_folder)
    name = setting.adapter.app
    kind, adapter = setting.device.type, bundle.adapter(name)
    (made,) = record_bundle(
        bundle, [name], traces_folder, device=kind, prompts=setting.data, limit=setting.limit
    )
    traces, origin = traces_of(bundle, adapter, traces_folder)
    found: dict = {"prompts": made.prompts, "tokens": made.tokens, "device": origin.device}
    for backend, dtype in (*DEFAULTS, ("reference", DTYPES["reference"][0])):
        if (reason := why_not(backend, bundle, adapter)) is not None:
            found[f"{backend} {dtype}"] = reason
            continue
        settings = RuntimeSettings(device="cpu" if backend == "reference" else None)
        replayed = ReplayOutcome(backend, dtype, weights_are_exact(bundle, backend, origin), origin)
        validate_backend(bundle, adapter, traces, replayed, settings)
        found[f"{backend} {dtype}"] = f"{replayed.token_exact} of {replayed.prompts} exact"
        found.setdefault("failures", []).extend(replayed.failures)
    return _failing(found, bool(found.get("failures")))


def evaluation(setting: Setting) -> dict:
    """`ss-train evaluate` there and on the CPU."""
    return _compared(
        setting,
        lambda device: evaluate_adapter(
            setting.adapter_folder, setting.base.path, setting.data,
            EvaluationSettings(setting.limit, setting.tokens, num_nodes=NODES), device=device,
        ),
        lambda result: {"tokens_per_call": result["tokens_per_call"], "tokens": result["tokens"]},
    )  # fmt: skip


def replaying(setting: Setting) -> dict:
    """`ss-train replay` there and on the CPU, the distilled text included."""

    def run(device: str) -> dict:
        own = setting.folder / f"own-{device}.jsonl"
        trees = (DraftChoice(NODES),)
        result = replay_adapter(
            setting.adapter_folder, setting.base.path, setting.data, own,
            ReplaySettings(setting.limit, setting.tokens, trees=trees), device=device,
        )  # fmt: skip
        return {**result, "texts": own.read_text()}

    def read(result: dict) -> dict:
        (tree,) = result["trees"].values()
        return {"tokens_per_call": tree["tokens_per_call"], "texts": result["texts"]}

    found = _compared(setting, run, read)
    for side in ("device", "cpu"):
        found[side].pop("texts", None)
    return found


def _compared(setting: Setting, run: Callable[[str], dict], read: Callable[[dict], dict]) -> dict:
    """The same on both devices, with seconds; failed where what is read differs."""
    found: dict = {}
    for side, device in (("device", setting.device.type), ("cpu", "cpu")):
        started = time.perf_counter()
        result = run(device)
        found[side] = {**read(result), "seconds": round(time.perf_counter() - started, 2)}
    same = all(found["device"][name] == value for name, value in found["cpu"].items() if name != "seconds")
    return _failing({**found, "equal": same}, not same)


def decoding(dtype: str) -> Callable[[Setting], dict]:
    """Drafts against plain decoding in one interleaved run, after a warm-up of all.

    The step model computes streams in every call, plain ones too, and Hugging Face's `generate` none: the
    ratio is to the faster of the two on each prompt.
    """

    def check(setting: Setting) -> dict:
        rates, equal = _rates(setting, dtype)
        ratios = rates["drafts"] / np.maximum(rates["plain"], rates["hf"])
        found = {f"{name} tokens/s": round(float(np.median(rate)), 1) for name, rate in rates.items()}
        found |= {"ratio": round(float(np.median(ratios)), 3), "equal": f"{equal} of {len(ratios)}"}
        found["ratio p10 p90"] = np.percentile(ratios, [10, 90]).round(3).tolist()
        return _failing(found, dtype == "float32" and equal < len(ratios))

    return check


def _rates(setting: Setting, dtype: str) -> tuple[dict[str, np.ndarray], int]:
    """Tokens per second of each timed answer by method, and how many answers are the same by all."""
    stream_model = load_stream_model(setting.base, setting.adapter, dtype, setting.device)
    model, ends = ReferenceStepModel(stream_model, NODES), setting.base.architecture.eos_ids

    def stepped(drafter: Drafter) -> Callable[[list[int]], list[int]]:
        return lambda prompt: [
            token
            for step in decode(model, drafter, prompt, setting.tokens, frozenset(ends))
            for token in step.tokens
        ]

    methods = {
        "plain": stepped(Drafter(1)),
        "hf": lambda p: continuations(stream_model.base, None, [p], ends, Continuation(setting.tokens))[0],
        "drafts": stepped(Drafter(NODES, bigram_bias=setting.adapter.bigram_bias())),
    }
    rates: dict[str, list[float]] = {name: [] for name in methods}
    equal = 0
    for number in range(setting.rounds + 1):  # the first is the warm-up
        for prompt in setting.prompts():
            texts = []
            for name, answer in methods.items():
                started = time.perf_counter()
                texts.append(answer(prompt))
                if number:
                    rates[name].append(len(texts[-1]) / (time.perf_counter() - started))
            equal += number > 0 and texts[0] == texts[1] == texts[2]
    return {name: np.array(rate) for name, rate in rates.items()}, equal


def training(name: str) -> Callable[[Setting], dict]:
    """An adapter of the same settings on the rows' own text: tokens per second, peak memory, loss."""

    def check(setting: Setting) -> dict:
        documents, lines = _documents(setting), []
        schedule = AdapterSchedule(epochs=10, evaluate_every=0, tokens_per_batch=1024, **TRAININGS[name])
        config = replace(setting.adapter.config, bigram_shared=False)
        if setting.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        fit_adapter(
            setting.base, setting.app, AdapterSettings(config, schedule), documents, documents[:2],
            setting.folder / name, RunOptions(device=setting.device.type), lines.append,
        )  # fmt: skip
        found = {"tokens/s": lines[-1]["tokens_per_second"], "steps": lines[-1]["steps"]}
        if setting.device.type == "cuda":
            found["peak MB"] = round(torch.cuda.max_memory_allocated() / 1e6)
        found["loss of stream 1"] = lines[-1]["parts"]["stream_1"]
        return _failing(found, not all(np.isfinite(list(lines[-1]["parts"].values()))))

    return check


def _documents(setting: Setting) -> list:
    shape, tokenizer = setting.base.architecture, read_tokenizer(setting.base.path)
    pairs = load_prompts(setting.app, setting.data, setting.limit, 0)
    ends = (shape.bos_id, shape.end_id, min(448, shape.max_positions), shape.vocab_size)
    return encode_examples(setting.app, pairs, tokenizer, *ends)


def _failing(found: dict, failed: bool) -> dict:
    return {**found, "passed": not failed}


CHECKS: dict[str, Callable[[Setting], dict]] = {
    "golden traces": golden_traces,
    "evaluate": evaluation,
    "replay and distill": replaying,
    "decoding float32": decoding("float32"),
    "decoding bfloat16": decoding("bfloat16"),
    **{f"training {name}": training(name) for name in TRAININGS},
}


def check_device(arguments: Namespace) -> int:
    """Body of the command."""
    if arguments.output:
        check_new_file(arguments.output, force=True)
    device, adapter = chosen_device(arguments.device), load_adapter(arguments.adapter)
    app = load_application(adapter.app)
    data = arguments.data or Path("apps") / adapter.app / "demo.jsonl"
    logging.disable_progress_bar()
    found: dict = {"device": device_text(device), "torch": torch.__version__, "date": time.strftime("%F")}
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(
            device, adapter, arguments.adapter, app, open_base(arguments.base), data, arguments.limit,
            arguments.rounds, arguments.max_tokens or app.max_tokens, Path(folder),
        )  # fmt: skip
        found["checks"] = {name: _run(CHECKS[name], setting) for name in arguments.only or CHECKS}
    if arguments.output:
        write_text(arguments.output, json.dumps(found, indent=1) + "\n")
    print_json(found) if arguments.json else _print(found)
    return 0 if all(check["passed"] for check in found["checks"].values()) else 1


def _run(check: Callable[[Setting], dict], setting: Setting) -> dict:
    started = time.perf_counter()
    try:
        result = check(setting)
    except Exception as error:  # one check must not take the others with it
        result = {"error": f"{type(error).__name__}: {error}"[:300], "passed": False}
    return {**result, "total_seconds": round(time.perf_counter() - started, 1)}


def _print(found: dict) -> None:
    table = Table(title=f"{found['device']}, torch {found['torch']}", title_justify="left", box=SIMPLE)
    for column in ("check", "result", "figures"):
        table.add_column(column)
    for name, check in found["checks"].items():
        shown = {k: v for k, v in check.items() if k not in ("passed", "total_seconds")}
        table.add_row(
            name, "passed" if check["passed"] else "FAILED", json.dumps(shown, ensure_ascii=False)
        )
    console().print(table)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = CommandParser(
        prog="python -m scripts.device_check",
        description=__doc__.partition("\n\n")[0],
        example="python -m scripts.device_check --adapter models/adapters/sqlctx "
        "--base models/base/ss-demo-base --output cuda.json",
    )
    parser.add_argument("--adapter", type=Path, required=True, help="adapter folder")
    parser.add_argument("--base", type=Path, required=True, help="base model folder")
    parser.add_argument("--data", type=Path, help="rows of the application (default: its demo.jsonl)")
    parser.add_argument("--limit", type=positive, default=12, help="rows")
    parser.add_argument("--rounds", type=positive, default=2, help="of the timed decoding")
    parser.add_argument("--max-tokens", type=positive, help="per prompt (default: the application's)")
    parser.add_argument("--only", action="append", choices=CHECKS, help="may be repeated (default: all)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON of all figures")
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return run_command(parser, check_device, argv)


if __name__ == "__main__":
    raise SystemExit(main())
