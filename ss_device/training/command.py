"""ss-train: base pre-training, self-distillation, adapters, evaluation."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ss_device.command_line import CommandParser, positive, print_json, run_command
from ss_device.errors import UserError

DESCRIPTION = "Train base models and speculative adapters, and measure them."
EXAMPLE = (
    "ss-train adapter sqlctx --base models/base/ss-demo-base --data train.jsonl "
    "--settings plus --output models/adapters/sqlctx"
)


def main(argv: list[str] | None = None) -> int:
    return run_command(build_parser(), lambda arguments: arguments.run(arguments), argv)


def build_parser() -> CommandParser:
    parser = CommandParser(prog="ss-train", description=DESCRIPTION, example=EXAMPLE)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_base(commands)
    _add_distill(commands)
    _add_adapter(commands)
    _add_evaluate(commands)
    return parser


def _add_base(commands) -> None:
    base = commands.add_parser(
        "base",
        help="pre-train a small base model from a recipe",
        example="ss-train base models/recipes/ss_demo_base.toml --data data --output models/base/mine",
    )
    base.add_argument("recipe", type=Path, help="TOML recipe: tokenizer, shape, data mix, schedule")
    base.add_argument("--data", type=Path, required=True, help="folder that the recipe's paths are in")
    base.add_argument("--output", type=Path, required=True, help="Hugging Face folder to write")
    base.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    base.add_argument("--json", action="store_true", help="log records as JSON lines on stdout")
    base.set_defaults(run=run_base)


def _add_distill(commands) -> None:
    distill = commands.add_parser(
        "distill",
        help="write the base model's own continuations of an application's prompts",
        example="ss-train distill sqlctx --base models/base/mine --data train.jsonl --output own.jsonl",
    )
    _common(distill)
    distill.add_argument("--output", type=Path, required=True, help="JSON lines file; a rerun goes on")
    distill.add_argument("--limit", type=positive, help="number of prompts")
    distill.add_argument("--max-tokens", type=positive, default=96)
    distill.add_argument("--batch-size", type=positive, default=64)
    distill.add_argument("--seed", type=int, default=0, help="which prompts are drawn")
    distill.set_defaults(run=run_distill)


def _add_adapter(commands) -> None:
    adapter = commands.add_parser("adapter", help="train an adapter on a frozen base", example=EXAMPLE)
    _common(adapter)
    adapter.add_argument("--output", type=Path, required=True, help="adapter folder to write")
    adapter.add_argument(
        "--settings",
        default="paper",
        help="paper, plus (parent bias and stream LoRA), shared, or a JSON object of settings",
    )
    adapter.add_argument("--valid", type=positive, default=200, help="rows kept out for rank statistics")
    adapter.add_argument("--limit", type=positive, help="use at most this many rows")
    adapter.add_argument("--epochs", type=float, default=5.0)
    adapter.add_argument("--learning-rate", type=float, default=5e-4)
    adapter.add_argument("--tokens-per-batch", type=positive, default=2048)
    adapter.add_argument("--max-length", type=positive, default=320, help="longest example in tokens")
    adapter.add_argument("--golden-prompts", type=Path, help="prompts file to put into the folder")
    adapter.add_argument(
        "--start", type=Path, metavar="ADAPTER", help="go on from a trained lossless adapter"
    )
    adapter.add_argument("--seed", type=int, default=0)
    adapter.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    adapter.set_defaults(run=run_adapter)


def _add_evaluate(commands) -> None:
    evaluate = commands.add_parser(
        "evaluate",
        help="tokens per call, acceptance by depth and task metric of an adapter, on the reference",
        example="ss-train evaluate models/adapters/sqlctx --base models/base/mine --data test.jsonl",
    )
    evaluate.add_argument("adapter", type=Path, help="adapter folder")
    evaluate.add_argument("--base", type=Path, required=True, help="base model folder")
    evaluate.add_argument("--data", type=Path, required=True, help="JSON lines with the app's fields")
    evaluate.add_argument("--limit", type=positive, default=200)
    evaluate.add_argument("--nodes", type=positive, default=32)
    evaluate.add_argument("--keep", type=positive, help="prune to this many nodes by early exit")
    evaluate.add_argument("--shape", choices=("best-first", "chain", "k-ary"), default="best-first")
    evaluate.add_argument("--top-k", type=positive, default=3)
    evaluate.add_argument("--prune-over", choices=("draft", "vocabulary"), default="draft")
    evaluate.add_argument("--max-tokens", type=positive)
    evaluate.add_argument("--json", action="store_true", help="one JSON object on stdout")
    evaluate.set_defaults(run=run_evaluate)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("app", help="application (a folder under apps/)")
    parser.add_argument("--base", type=Path, required=True, help="base model folder")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with the app's fields")
    parser.add_argument("--json", action="store_true", help="log records as JSON lines on stdout")


def run_base(arguments: argparse.Namespace) -> int:
    from ss_device.training.pretrain import pretrain
    from ss_device.training.progress import training_progress
    from ss_device.training.recipe import load_recipe

    recipe = load_recipe(arguments.recipe)
    with training_progress(recipe.name, arguments.json) as report:
        pretrain(recipe, arguments.data, arguments.output, arguments.resume, report=report)
    return 0


def run_distill(arguments: argparse.Namespace) -> int:
    from ss_device.application import load_application
    from ss_device.base_model import open_base
    from ss_device.reference.stream_model import load_base
    from ss_device.training.distill import distill
    from ss_device.training.examples import load_prompts
    from ss_device.training.progress import training_progress

    app, base = load_application(arguments.app), open_base(arguments.base)
    pairs = load_prompts(app, arguments.data, arguments.limit, arguments.seed)
    with training_progress(f"{app.name}: continuations", arguments.json) as report:
        distill(
            load_base(base),
            read_tokenizer(arguments.base),
            [prompt for prompt, _ in pairs],
            arguments.output,
            base.architecture.bos_id,
            base.architecture.eos_ids[0],
            arguments.max_tokens,
            arguments.batch_size,
            lambda done, total: report({"step": done, "steps": total}),
        )
    return 0


def run_adapter(arguments: argparse.Namespace) -> int:
    from ss_device.adapter import load_adapter
    from ss_device.application import load_application
    from ss_device.base_model import open_base
    from ss_device.training.adapt import AdapterSchedule, train_adapter
    from ss_device.training.examples import encode_examples, load_prompts
    from ss_device.training.progress import training_progress

    app, base = load_application(arguments.app), open_base(arguments.base)
    config = read_settings(arguments.settings)
    config.check(base.architecture)
    start = load_adapter(arguments.start) if arguments.start else None
    pairs = load_prompts(app, arguments.data, arguments.limit, arguments.seed)
    documents = encode_examples(
        app,
        pairs,
        read_tokenizer(arguments.base),
        base.architecture.bos_id,
        base.architecture.eos_ids[0],
        arguments.max_length,
    )
    held = min(arguments.valid, max(1, len(documents) // 10))
    schedule = AdapterSchedule(
        epochs=arguments.epochs,
        tokens_per_batch=arguments.tokens_per_batch,
        learning_rate=arguments.learning_rate,
        seed=arguments.seed,
    )
    with training_progress(f"{app.name}: adapter", arguments.json) as report:
        train_adapter(
            base, app, config, schedule, documents[held:] or documents, documents[:held],
            arguments.output, arguments.resume, report, start,
        )  # fmt: skip
    if arguments.golden_prompts:
        text = arguments.golden_prompts.read_text()
        (arguments.output / "golden_prompts.jsonl").write_text(text)
    return 0


def run_evaluate(arguments: argparse.Namespace) -> int:
    from ss_device.evaluation.report import evaluate_adapter

    result = evaluate_adapter(
        adapter_folder=arguments.adapter,
        base_folder=arguments.base,
        data=arguments.data,
        limit=arguments.limit,
        num_nodes=arguments.nodes,
        num_kept=arguments.keep,
        shape=arguments.shape,
        top_k=arguments.top_k,
        prune_over=arguments.prune_over,
        max_tokens=arguments.max_tokens,
    )
    if arguments.json:
        print_json(result)
    else:
        for name, value in result.items():
            print(f"{name:30} {value}")
    return 0


def read_settings(text: str):
    """SpeculativeConfig of a preset name or a JSON object; UserError names what is wrong."""
    from ss_device.config import SpeculativeConfig, paper_config, plus_config

    presets = {
        "paper": paper_config,
        "plus": plus_config,
        "shared": lambda: paper_config("shared"),
        "shared-v2": lambda: paper_config("shared", main_attends_streams=True),
    }
    if text in presets:
        return presets[text]()
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"settings '{text}' are neither {', '.join(presets)} nor a JSON object ({error.msg})"
        ) from error
    return SpeculativeConfig.from_dict(raw)


def read_tokenizer(base: Path):
    """The base folder's tokenizer."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(base / "tokenizer.json"))
