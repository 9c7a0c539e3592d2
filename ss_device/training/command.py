"""ss-train: base pre-training, self-distillation, adapters, evaluation."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from ss_device.command_line import (
    CommandParser,
    add_device,
    positive,
    positive_number,
    print_json,
    run_command,
)
from ss_device.errors import UserError

DESCRIPTION = "Train base models and speculative adapters, and measure them."
DATA_HELP = "JSON lines with the app's fields, or hub or hub:SPLIT for the app's data set"
FORCE_HELP = "start again: replace an earlier run of this output and what it wrote"
BASE_HELP = "base model folder, or its id on the Hugging Face hub"
EXAMPLE = (
    "ss-train adapter sqlctx --base models/base/ss-demo-base --data train.jsonl "
    "--settings plus --output models/adapters/sqlctx"
)


def main(argv: list[str] | None = None) -> int:
    bound_cpu_caches()
    return run_command(build_parser(), lambda arguments: arguments.run(arguments), argv)


def bound_cpu_caches() -> None:
    """Before torch is loaded: keep few of oneDNN's compiled operations.

    They are kept by shape, and batches have many shapes: at the default of 1024 the training of the
    demo base grew to 11.7 GB within half an hour on a CPU; with 32 it took 3 GB, and was no slower.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "32")


def build_parser() -> CommandParser:
    parser = CommandParser(prog="ss-train", description=DESCRIPTION, example=EXAMPLE)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_base(commands)
    _add_distill(commands)
    _add_bigram_bias(commands)
    _add_adapter(commands)
    _add_lora(commands)
    _add_evaluate(commands)
    _add_replay(commands)
    _add_score(commands)
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
    source = base.add_mutually_exclusive_group()
    source.add_argument("--start", type=Path, metavar="BASE", help="start from a base model's weights")
    source.add_argument(
        "--tokenizer", type=Path, metavar="BASE", help="take a base model's tokenizer, train none"
    )
    budget = base.add_argument_group("how long: a stretch ends with the rate decayed to zero")
    budget.add_argument("--steps", type=positive, help="optimizer steps (default: the recipe's)")
    budget.add_argument("--minutes", type=positive_number, help="time budget instead, without measurements")
    budget.add_argument(
        "--hold", action="store_true", help="do not decay and write no model: a later stretch continues"
    )
    base.add_argument(
        "--resume",
        action="store_true",
        help="finish the interrupted stretch, or add one to the state before the last one's decay",
    )
    base.add_argument("--force", action="store_true", help=FORCE_HELP)
    base.add_argument("--precision", choices=("fp32", "bf16"), help="default: bf16 on CUDA, else fp32")
    base.add_argument("--checkpoint-minutes", type=float, default=5.0, help="time between checkpoints")
    base.add_argument(
        "--check-minutes", type=float, default=15.0, metavar="M",
        help="measure the recipe's checks this often, and at the end",
    )  # fmt: skip
    base.add_argument("--shard-size", default="50GB", metavar="SIZE", help="largest weight file, as 15MB")
    add_device(base)
    base.add_argument("--json", action="store_true", help="log records as JSON lines on stdout")
    base.set_defaults(run=run_base)


def _add_distill(commands) -> None:
    distill = commands.add_parser(
        "distill",
        help="write the base model's own continuations of an application's prompts",
        example="ss-train distill sqlctx --base models/base/mine --data train.jsonl --output own.jsonl",
    )
    _common(distill)
    distill.add_argument("--output", type=Path, required=True, help="JSON lines file; a rerun continues it")
    distill.add_argument("--limit", type=positive, help="number of prompts")
    distill.add_argument("--max-tokens", type=positive, default=96, help="longest text in tokens")
    distill.add_argument(
        "--longest-prompt", type=positive, help="leave out longer prompts (default: what fits the context)"
    )
    distill.add_argument("--temp", type=float, default=0.0, help="0: greedy (the default)")
    distill.add_argument("--top-p", type=float, default=1.0, help="nucleus of sampling")
    distill.add_argument("--samples", type=positive, default=1, help="sampled texts per prompt")
    distill.add_argument("--batch-size", type=positive, default=64, help="prompts at a time")
    distill.add_argument("--seed", type=int, default=0, help="of the drawn prompts and of sampling")
    distill.set_defaults(run=run_distill)


def _add_adapter(commands) -> None:
    adapter = commands.add_parser("adapter", help="train an adapter on a frozen base", example=EXAMPLE)
    _common(adapter)
    adapter.add_argument("--output", type=Path, required=True, help="adapter folder to write")
    adapter.add_argument(
        "--settings",
        default="paper",
        help="paper, plus (bigram bias and stream LoRA), shared, or a JSON object of settings",
    )
    adapter.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change one of the settings, as --set num_msa_layers=6",
    )
    adapter.add_argument("--valid", type=positive, default=200, help="rows kept out for validation")
    adapter.add_argument("--limit", type=positive, help="use at most this many rows")
    adapter.add_argument("--epochs", type=float, default=5.0, help="passes over the data")
    adapter.add_argument("--learning-rate", type=float, default=5e-4, help="highest learning rate")
    adapter.add_argument(
        "--tokens-per-batch", type=positive, default=2048, help="tokens of one optimizer step"
    )
    adapter.add_argument(
        "--max-length", type=positive, help="longest example in tokens (320, or the base's context)"
    )
    adapter.add_argument("--golden-prompts", type=Path, help="prompts file to put into the folder")
    adapter.add_argument("--start", type=Path, metavar="ADAPTER", help="start from a trained adapter")
    adapter.add_argument(
        "--bigram-bias",
        type=Path,
        metavar="FILE",
        help="bigram bias to start from (ss-train bigram-bias); frozen when bigram_shared is set",
    )
    adapter.add_argument("--seed", type=int, default=0, help="of weights and data order")
    adapter.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    adapter.add_argument("--force", action="store_true", help=FORCE_HELP)
    _add_objective(adapter.add_argument_group("objective"))
    _add_execution(adapter.add_argument_group("execution"))
    adapter.set_defaults(run=run_adapter)


def _add_objective(group) -> None:
    group.add_argument(
        "--loss", default="ce", help="ce: streams learn the text; kl: the main stream's distribution"
    )
    group.add_argument("--main-weight", type=float, help="weight of the main stream (α0)")
    group.add_argument("--stream-weight", type=float, help="weight of every stream (αj)")
    group.add_argument(
        "--depth-decay", type=float, default=1.0, help="stream j weighs αj times this to the j-1"
    )
    group.add_argument(
        "--pruning",
        default="joint",
        help="joint, or after: freeze all parts of --start and train the early exit alone",
    )
    group.add_argument(
        "--evaluate-every", type=int, default=200, metavar="STEPS", help="validate this often (0: never)"
    )
    group.add_argument(
        "--patience",
        type=int,
        default=0,
        metavar="N",
        help="stop after N validations without improvement and keep the best weights",
    )


def _add_execution(group) -> None:
    group.add_argument(
        "--segment",
        type=positive,
        default=0,
        metavar="N",
        help="hold the streams of N positions in memory at a time (same gradients)",
    )
    group.add_argument(
        "--gradient-checkpointing", action="store_true", help="recompute layers in the backward pass"
    )
    group.add_argument("--precision", default="fp32", help="fp32 or bf16")
    group.add_argument("--quantize-base", default="", metavar="nf4", help="quantize the base (CUDA)")
    group.add_argument("--checkpoint-minutes", type=float, default=5.0, help="time between checkpoints")


def _add_bigram_bias(commands) -> None:
    bias = commands.add_parser(
        "bigram-bias",
        help="train a bigram bias once for a base, on the texts of its applications",
        example="ss-train bigram-bias sqlctx=own_sql.jsonl e2e_nlg=own_e2e.jsonl "
        "--base models/base/mine --output models/base/mine.bigram_bias.safetensors",
    )
    bias.add_argument("data", nargs="+", metavar="APP=FILE", help="JSON lines of each application")
    bias.add_argument("--base", type=Path, required=True, help=BASE_HELP)
    bias.add_argument("--output", type=Path, required=True, help="safetensors file to write")
    bias.add_argument("--force", action="store_true", help="replace an existing file")
    bias.add_argument("--rank", type=positive, default=32, help="rank of the low-rank term")
    bias.add_argument("--epochs", type=positive, default=30, help="passes over the data")
    bias.add_argument("--seed", type=int, default=0, help="of weights and data order")
    add_device(bias)
    bias.add_argument("--json", action="store_true", help="log records as JSON lines on stdout")
    bias.set_defaults(run=run_bigram_bias)


def _add_lora(commands) -> None:
    lora = commands.add_parser(
        "lora",
        help="plain LoRA fine-tuning without streams: the quality baseline, a PEFT folder",
        example="ss-train lora sqlctx --base models/base/mine --data train.jsonl --output runs/lora",
    )
    _common(lora)
    lora.add_argument("--output", type=Path, required=True, help="PEFT folder to write")
    lora.add_argument("--rank", type=positive, default=32, help="rank of LoRA")
    lora.add_argument("--alpha", type=float, default=64.0, help="alpha of LoRA: its scale is alpha / rank")
    lora.add_argument("--limit", type=positive, help="use at most this many rows")
    lora.add_argument("--epochs", type=float, default=5.0, help="passes over the data")
    lora.add_argument("--learning-rate", type=float, default=5e-4, help="highest learning rate")
    lora.add_argument(
        "--tokens-per-batch", type=positive, default=2048, help="tokens of one optimizer step"
    )
    lora.add_argument(
        "--max-length", type=positive, help="longest example in tokens (320, or the base's context)"
    )
    lora.add_argument("--seed", type=int, default=0, help="of weights and data order")
    lora.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    lora.add_argument("--force", action="store_true", help=FORCE_HELP)
    lora.set_defaults(run=run_lora)


def _add_score(commands) -> None:
    score = commands.add_parser(
        "score",
        help="task metric of a base model or a plain LoRA, one token at a time",
        example="ss-train score sqlctx --base models/base/mine --lora runs/lora --data test.jsonl",
    )
    _common(score)
    score.add_argument("--lora", type=Path, metavar="FOLDER", help="PEFT folder (default: the base alone)")
    score.add_argument("--limit", type=positive, default=200, help="number of rows")
    score.add_argument(
        "--max-tokens", type=positive, help="longest answer in tokens (default: the application's)"
    )
    score.add_argument("--longest-prompt", type=positive, help="leave out longer prompts (tokens)")
    score.add_argument("--batch-size", type=positive, default=32, help="prompts at a time")
    score.set_defaults(run=run_score)


def _add_evaluate(commands) -> None:
    evaluate = commands.add_parser(
        "evaluate",
        help="tokens per call, acceptance by depth and task metric of an adapter, on the reference",
        example="ss-train evaluate models/adapters/sqlctx --base models/base/mine --data test.jsonl",
    )
    evaluate.add_argument("adapter", type=Path, help="adapter folder")
    evaluate.add_argument("--base", type=Path, required=True, help=BASE_HELP)
    evaluate.add_argument("--data", required=True, help=DATA_HELP)
    evaluate.add_argument("--app", help="application (default: the adapter's)")
    evaluate.add_argument("--limit", type=positive, default=200, help="number of rows")
    evaluate.add_argument("--nodes", type=positive, default=32, help="tree nodes per call")
    evaluate.add_argument("--keep", type=positive, help="prune to this many nodes by early exit")
    evaluate.add_argument(
        "--shape",
        choices=("best-first", "chain", "k-ary"),
        default="best-first",
        help="how the tree is grown",
    )
    evaluate.add_argument(
        "--tree-top-k", type=positive, default=3, help="children per node of a k-ary tree"
    )
    evaluate.add_argument(
        "--prune-over",
        choices=("draft", "vocabulary"),
        default="draft",
        help="what early-exit scores are normalised over",
    )
    evaluate.add_argument(
        "--max-tokens", type=positive, help="longest answer in tokens (default: the application's)"
    )
    evaluate.add_argument("--longest-prompt", type=positive, help="leave out longer prompts (tokens)")
    add_device(evaluate)
    evaluate.add_argument("--json", action="store_true", help="one JSON object on stdout")
    evaluate.set_defaults(run=run_evaluate)


def _add_replay(commands) -> None:
    replay = commands.add_parser(
        "replay",
        help="tokens per call of many trees at once, read off the model's own text",
        example="ss-train replay models/adapters/sqlctx --base models/base/mine --data test.jsonl "
        "--continuations own_test.jsonl --tree best-first:32 --tree chain:5",
    )
    replay.add_argument("adapter", type=Path, help="adapter folder")
    replay.add_argument("--base", type=Path, required=True, help=BASE_HELP)
    replay.add_argument("--data", required=True, help=DATA_HELP)
    replay.add_argument(
        "--continuations", type=Path, required=True, help="the model's own text; written if missing"
    )
    replay.add_argument(
        "--tree", action="append", metavar="SHAPE:NODES[:STREAMS]", help="default best-first:32"
    )
    replay.add_argument("--limit", type=positive, default=200, help="number of rows")
    replay.add_argument(
        "--max-tokens", type=positive, help="longest answer in tokens (default: the application's)"
    )
    replay.add_argument("--longest-prompt", type=positive, help="leave out longer prompts (tokens)")
    add_device(replay)
    replay.add_argument("--json", action="store_true", help="one JSON object on stdout")
    replay.set_defaults(run=run_replay)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("app", help="application: a folder under apps/ or $SS_APPS, or its path")
    parser.add_argument("--base", type=Path, required=True, help=BASE_HELP)
    parser.add_argument("--data", required=True, help=DATA_HELP)
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="log records as JSON lines on stdout")


def run_base(arguments: argparse.Namespace) -> int:
    from ss_device.training.budget import Budget
    from ss_device.training.pretrain import default_precision, pretrain
    from ss_device.training.progress import training_progress
    from ss_device.training.recipe import load_recipe
    from ss_device.training.run_folder import writing

    recipe = load_recipe(arguments.recipe)
    if not re.fullmatch(r"[1-9]\d*[KMG]B", arguments.shard_size):
        raise UserError(f"--shard-size {arguments.shard_size} is not a size as 15MB or 2GB")
    if arguments.steps and arguments.minutes:
        raise UserError("--steps and --minutes exclude each other")
    steps = arguments.steps or (0 if arguments.minutes else recipe.schedule.steps)
    budget = Budget(steps, arguments.minutes or 0.0, arguments.hold)
    given = arguments.steps or arguments.minutes or arguments.hold
    with writing(arguments.output), training_progress(recipe.name, arguments.json) as report:
        pretrain(
            recipe, arguments.data, arguments.output, budget if given else None, arguments.resume,
            arguments.precision or default_precision(arguments.device), arguments.checkpoint_minutes,
            arguments.check_minutes, report, arguments.start, arguments.tokenizer, arguments.shard_size,
            arguments.force, arguments.device,
        )  # fmt: skip
    return 0


def run_distill(arguments: argparse.Namespace) -> int:
    from ss_device.reference.device import chosen_device
    from ss_device.reference.stream_model import load_base
    from ss_device.tokenizer_file import read_tokenizer
    from ss_device.training.continuations import Continuation
    from ss_device.training.distill import Prompt, distill
    from ss_device.training.examples import encode_prompts, encode_turns, load_prompts
    from ss_device.training.progress import training_progress
    from ss_device.training.rows import source_identity

    if arguments.samples > 1 and arguments.temp == 0:
        raise UserError("--samples needs --temp above 0: greedy texts are all the same")
    where, (app, base) = chosen_device(arguments.device), _application_and_base(arguments)
    settings = Continuation(
        arguments.max_tokens, arguments.temp, arguments.top_p, arguments.seed, app.stop_strings
    )
    pairs = load_prompts(app, arguments.data, arguments.limit, arguments.seed)
    tokenizer, ends = read_tokenizer(base.path), base.architecture.eos_ids
    encode = encode_turns if app.kind == "chat" else encode_prompts
    shape = base.architecture
    encoded = encode(app, pairs, tokenizer, shape.bos_id, shape.end_id, shape.vocab_size)
    texts = [None] * len(encoded) if app.kind == "chat" else [text for text, _ in pairs]
    longest = arguments.longest_prompt or base.architecture.max_positions - arguments.max_tokens
    prompts = [Prompt(tuple(ids), t) for ids, t in zip(encoded, texts, strict=True) if len(ids) <= longest]
    if not prompts:
        raise UserError(f"{arguments.data}: no prompt of at most {longest} tokens")
    made_from = {
        "app": app.name,
        "prompt": app.template,
        "base": base.identity.to_dict(),
        "data": source_identity(app, arguments.data),
    }
    with training_progress(f"{app.name}: continuations", arguments.json) as report:
        distill(
            load_base(base, device=where), tokenizer, prompts, arguments.output, ends, settings, made_from,
            arguments.samples, arguments.batch_size, report,
        )  # fmt: skip
    return 0


def run_bigram_bias(arguments: argparse.Namespace) -> int:
    from ss_device.application import load_application
    from ss_device.base_model import open_base
    from ss_device.outputs import check_new_file
    from ss_device.tokenizer_file import read_tokenizer
    from ss_device.training.bigram_bias import save_bigram_bias, train_bigram_bias
    from ss_device.training.examples import encode_examples, load_prompts
    from ss_device.training.progress import training_progress

    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    check_new_file(arguments.output, arguments.force)
    base = open_base(arguments.base)
    tokenizer = read_tokenizer(base.path)
    shape, documents = base.architecture, []
    for item in arguments.data:
        name, separator, path = item.partition("=")
        if not separator:
            raise UserError(f"'{item}' is not APP=FILE, as sqlctx=own.jsonl")
        app = load_application(name)
        pairs = load_prompts(app, Path(path))
        documents += encode_examples(
            app, pairs, tokenizer, shape.bos_id, shape.end_id, shape.max_positions, shape.vocab_size
        )
    with training_progress("bigram bias", arguments.json) as report:
        tensors = train_bigram_bias(
            documents,
            shape.vocab_size,
            arguments.rank,
            arguments.epochs,
            seed=arguments.seed,
            report=report,
            device=arguments.device,
        )
    save_bigram_bias(tensors, base.identity, arguments.output)
    return 0


def _application_and_base(arguments: argparse.Namespace):
    """The application, with the base's chat template where it asks for one, and the base."""
    from ss_device.application import load_application
    from ss_device.base_model import open_base
    from ss_device.training.chat_template import with_tokenizer_template

    app, base = load_application(arguments.app), open_base(arguments.base)
    return with_tokenizer_template(app, base.path), base


def run_lora(arguments: argparse.Namespace) -> int:
    from ss_device.tokenizer_file import read_tokenizer
    from ss_device.training.examples import encode_examples, load_prompts
    from ss_device.training.finetune import train_lora
    from ss_device.training.progress import training_progress
    from ss_device.training.run_folder import writing

    app, base = _application_and_base(arguments)
    pairs = load_prompts(app, arguments.data, arguments.limit, arguments.seed)
    documents = encode_examples(
        app, pairs, read_tokenizer(base.path), base.architecture.bos_id,
        base.architecture.end_id,
        longest_example(arguments.max_length, base.architecture.max_positions),
        base.architecture.vocab_size,
    )  # fmt: skip
    schedule = read_schedule(arguments)
    with writing(arguments.output), training_progress(f"{app.name}: LoRA", arguments.json) as report:
        train_lora(
            base, app, arguments.rank, arguments.alpha, schedule, documents, arguments.output,
            arguments.resume, report, arguments.force, arguments.device,
        )  # fmt: skip
    return 0


def run_score(arguments: argparse.Namespace) -> int:
    from ss_device.evaluation.scoring import score_model
    from ss_device.training.progress import training_progress

    with training_progress(f"{arguments.app}: answers", as_json=False) as report:
        result = score_model(
            arguments.app, arguments.base, arguments.lora, arguments.data, arguments.limit,
            arguments.max_tokens, arguments.batch_size, arguments.longest_prompt,
            lambda r: None if arguments.json else report(r), arguments.device,
        )  # fmt: skip
    _print_result(result, arguments.json)
    return 0


def _print_result(result: dict, as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    for name, value in result.items():
        print(f"{name:30} {value}")


def run_adapter(arguments: argparse.Namespace) -> int:
    from ss_device.adapter import load_adapter
    from ss_device.tokenizer_file import read_tokenizer
    from ss_device.training.adapt import train_adapter
    from ss_device.training.base_loading import check_quantization
    from ss_device.training.bigram_bias import load_bigram_bias
    from ss_device.training.examples import encode_examples, load_prompts
    from ss_device.training.progress import training_progress
    from ss_device.training.run_folder import writing

    app, base = _application_and_base(arguments)
    config = read_settings(arguments.settings, arguments.set)
    config.check(base.architecture)
    schedule = read_schedule(arguments)
    check_quantization(schedule)
    start = load_adapter(arguments.start) if arguments.start else None
    golden = arguments.golden_prompts.read_text(encoding="utf-8") if arguments.golden_prompts else ""
    bias = None
    if arguments.bigram_bias:
        bias, _ = load_bigram_bias(arguments.bigram_bias, base, config.bigram_rank)
    pairs = load_prompts(app, arguments.data, arguments.limit, arguments.seed)
    documents = encode_examples(
        app,
        pairs,
        read_tokenizer(base.path),
        base.architecture.bos_id,
        base.architecture.end_id,
        longest_example(arguments.max_length, base.architecture.max_positions),
        base.architecture.vocab_size,
    )
    held = min(arguments.valid, max(1, len(documents) // 10))
    with writing(arguments.output), training_progress(f"{app.name}: adapter", arguments.json) as report:
        train_adapter(
            base, app, config, schedule, documents[held:] or documents, documents[:held],
            arguments.output, arguments.resume, report, start, bias, arguments.force, golden,
            arguments.device,
        )  # fmt: skip
    return 0


def read_schedule(arguments: argparse.Namespace):
    """AdapterSchedule of the options of the same names."""
    from dataclasses import fields

    from ss_device.training.schedule import AdapterSchedule

    given = vars(arguments)
    return AdapterSchedule(**{f.name: given[f.name] for f in fields(AdapterSchedule) if f.name in given})


def longest_example(wanted: int | None, context: int) -> int:
    """Tokens an example may have; UserError when the wish exceeds the base model's context."""
    if wanted is not None and wanted > context:
        raise UserError(f"--max-length {wanted} exceeds the base model's context of {context}")
    return wanted or min(320, context)


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
        tree_top_k=arguments.tree_top_k,
        prune_over=arguments.prune_over,
        max_tokens=arguments.max_tokens,
        app_name=arguments.app,
        longest_prompt=arguments.longest_prompt,
        device=arguments.device,
    )
    _print_result(result, arguments.json)
    return 0


def run_replay(arguments: argparse.Namespace) -> int:
    from ss_device.draft_choice import DraftChoice
    from ss_device.evaluation.replay_report import replay_adapter
    from ss_device.training.progress import training_progress

    trees = [DraftChoice.parse(text) for text in arguments.tree or ["best-first:32"]]
    with training_progress("replay", as_json=False) as report:
        result = replay_adapter(
            arguments.adapter,
            arguments.base,
            arguments.data,
            arguments.continuations,
            trees,
            arguments.limit,
            arguments.max_tokens,
            arguments.longest_prompt,
            report,
            device=arguments.device,
        )
    if arguments.json:
        print_json(result)
        return 0
    for tree, summary in result["trees"].items():
        depths = " ".join(f"{a:.2f}" for a in summary["acceptance_by_depth"])
        plain = summary["without_repetition"]["tokens_per_call"]
        print(
            f"{tree:20} {summary['tokens_per_call']:.2f} tokens per call "
            f"({plain:.2f} where the text does not repeat itself)   by depth {depths}"
        )
    return 0


def read_settings(text: str, changes: Sequence[str] = ()):
    """SpeculativeConfig of a preset name or a JSON object, with NAME=VALUE changes on top.

    UserError names what is wrong.
    """
    from ss_device.config import SpeculativeConfig, paper_config, plus_config

    presets = {
        "paper": paper_config,
        "plus": plus_config,
        "shared": lambda: paper_config("shared"),
        "shared-v2": lambda: paper_config("shared", main_attends_streams=True),
    }
    if text in presets:
        raw = presets[text]().to_dict()
    else:
        raw = _json(text, f"settings '{text}' are neither {', '.join(presets)} nor a JSON object")
        if not isinstance(raw, dict):
            raise UserError(f"settings '{text}' are not a JSON object")
    for change in changes:
        name, separator, value = change.partition("=")
        if not separator:
            raise UserError(f"--set {change}: expected NAME=VALUE, as num_msa_layers=6")
        raw[name] = value if value in _WORDS else _json(value, f"--set {change}: '{value}' is no value")
    return SpeculativeConfig.from_dict(raw)


_WORDS = ("lossless", "shared", "adapter", "base", "shift", "same")


def _json(text: str, message: str):
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{message} ({error.msg})") from error


if __name__ == "__main__":  # accelerate launch -m ss_device.training.command ...
    raise SystemExit(main())
