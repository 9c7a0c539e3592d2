"""`ss-generate`: answer prompts with a bundle, several tokens per model call."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ss_device.bundle import BundledAdapter, open_bundle
from ss_device.command_line import (
    CommandParser,
    positive,
    prompts_from_file,
    row_errors,
    run_command,
)
from ss_device.decoding import check_request
from ss_device.errors import UserError
from ss_device.settings import add_settings, settings_of
from ss_runtime.chat_prompt import ChatPrompt
from ss_runtime.commands.cache_settings import CacheSettings
from ss_runtime.commands.chat import talk
from ss_runtime.commands.display import totals_text
from ss_runtime.commands.session import Session, open_session, run_prompt
from ss_runtime.generation import Result
from ss_runtime.plain_base import plain_base
from ss_runtime.settings import DraftSettings, RuntimeSettings, SamplingSettings
from ss_runtime.tokenization import load_tokenizer


def main(argv: list[str] | None = None) -> int:
    """Entry point of `ss-generate`; returns the exit code."""
    return run_command(_parser(), generate_command, argv)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="ss-generate",
        description="Generate from a bundle: the model verifies its last draft and writes its "
        "next one in the same call.",
        example="ss-generate --bundle build/sqlctx --input apps/sqlctx/demo.jsonl --limit 3 --show-steps",
    )
    add = parser.add_argument
    add("--bundle", type=Path, required=True, metavar="DIR", help="bundle folder made by ss-convert")
    add("--adapter", metavar="NAME", help="which of the bundle's adapters (default: the only one)")
    add(
        "--no-adapter",
        action="store_true",
        help="the base alone, on MLX (--lookup drafts by prompt lookup)",
    )
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help="one prompt, taken as it is")
    prompts.add_argument(
        "--input",
        type=Path,
        metavar="FILE",
        help="JSON lines (.jsonl, .jsonl.gz) with 'prompt' or the application's fields",
    )
    prompts.add_argument("--chat", action="store_true", help="talk: one line of input per message")
    add("--limit", type=positive, metavar="N", help="only the first N rows of --input")
    add("--max-tokens", type=positive, metavar="N", help="default: the application's")
    for settings in (RuntimeSettings, CacheSettings, DraftSettings):
        add_settings(parser, settings)
    add("--show-steps", action="store_true", help="draw every model call")
    add("--json", action="store_true", help="print one JSON object per prompt")
    add_settings(parser, SamplingSettings)
    return parser


def generate_command(arguments: argparse.Namespace) -> None:
    """Body of the command."""
    settings, drafts = settings_of(arguments, RuntimeSettings), settings_of(arguments, DraftSettings)
    settings.check()
    cache = settings_of(arguments, CacheSettings)
    if arguments.no_adapter:
        _check_base_alone(arguments.adapter, settings, drafts)
    cache.check()
    if arguments.chat and (arguments.json or arguments.show_steps):
        raise UserError("--chat writes text only; leave --json and --show-steps out")
    sampler = settings_of(arguments, SamplingSettings).sampler()
    bundle = open_bundle(arguments.bundle)
    adapter = plain_base(bundle.manifest) if arguments.no_adapter else bundle.adapter(arguments.adapter)
    tokenizer = load_tokenizer(bundle)
    prompts = []
    for text in _texts(arguments.prompt, arguments.input, arguments.limit, adapter):
        with row_errors(arguments.input, len(prompts)):
            prompts.append(tokenizer.encode(text))
    kept = cache if arguments.chat or cache.prompt_cache else None
    session = open_session(
        bundle, adapter, tokenizer, settings, drafts, kept, arguments.max_tokens, sampler
    )
    _check_prompts(session, prompts, arguments.input)
    if session.hint:
        print(session.hint, file=sys.stderr)
    if arguments.chat:
        return talk(session, ChatPrompt(bundle.path, tokenizer), cache.prompt_cache)
    _answer(session, prompts, arguments.show_steps, arguments.json)
    if cache.prompt_cache:
        session.model.text.save(cache.prompt_cache)


def _check_base_alone(adapter: str | None, settings: RuntimeSettings, drafts: DraftSettings) -> None:
    if adapter or settings.backend not in (None, "mlx"):
        raise UserError("--no-adapter is the base alone on MLX; leave --adapter and other back ends out")
    if not drafts.lookup and (drafts.nodes or drafts.shape):
        raise UserError("--no-adapter drafts nothing without --lookup; leave --nodes and --shape out")


def _texts(prompt: str | None, file: Path | None, limit: int | None, adapter: BundledAdapter) -> list[str]:
    """Prompt texts of the command line or of the rows of --input; none in a conversation."""
    if file is None:
        return [] if prompt is None else [prompt]
    return [text for _, text in prompts_from_file(file, adapter.prompt, limit)]


def _answer(session: Session, prompts: list[list[int]], show_steps: bool, as_json: bool) -> None:
    """Answer all prompts, and say how they went."""
    results: list[Result] = []
    for ids in prompts:
        records, result = run_prompt(session, ids, show_steps, as_json)
        results.append(result)
        if not as_json and not show_steps:
            print(totals_text(records, result), file=sys.stderr)
    if len(results) > 1 and not as_json:
        print(_overall(results), file=sys.stderr)


def _check_prompts(session: Session, prompts: list[list[int]], file: Path | None) -> None:
    """Refuse a prompt that does not fit before any is answered."""
    for index, ids in enumerate(prompts):
        with row_errors(file, index):
            check_request(
                session.model.limits,
                session.drafter.num_nodes,
                len(ids),
                session.max_tokens,
                session.sampler,
            )


def _overall(results: list[Result]) -> str:
    calls = sum(r.steps for r in results)
    tokens = sum(r.generated_tokens - 1 for r in results)
    per_call = f"{tokens / calls:.2f} tokens per call" if calls else "no call after the prompts'"
    return f"{len(results)} prompts: {sum(r.generated_tokens for r in results)} tokens, {per_call}"
