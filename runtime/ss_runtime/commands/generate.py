"""`ss-generate`: answer prompts with a bundle, several tokens per model call."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ss_device.bundle import Bundle, BundledAdapter, open_bundle
from ss_device.command_line import (
    CommandParser,
    add_device,
    positive,
    prompts_from_file,
    row_errors,
    run_command,
)
from ss_device.decoding import Drafter, check_request
from ss_device.draft_choice import DraftChoice
from ss_device.errors import UserError
from ss_device.prompt_lookup import PromptLookup
from ss_device.sampling import Sampler
from ss_runtime.backends import (
    BACKENDS,
    DTYPES,
    KV_BITS,
    QUANTIZATIONS,
    check_backend,
    default_backend,
    default_dtype,
    fastest_stream_rows,
    open_backend,
)
from ss_runtime.chat_prompt import ChatPrompt
from ss_runtime.commands.cache_options import add_cache_options, check_cache_options, with_cache
from ss_runtime.commands.chat import talk
from ss_runtime.commands.display import totals_text
from ss_runtime.commands.sampling_options import add_sampling_options, sampler_from_options
from ss_runtime.commands.session import Session, run_prompt
from ss_runtime.coreml.step_model import COMPUTE_UNITS
from ss_runtime.generation import Result
from ss_runtime.plain_base import has_streams, plain_base
from ss_runtime.tokenization import BundleTokenizer, load_tokenizer
from ss_runtime.tuning import AdaptiveChoice, drafts_need_tuning, read_tuning, untuned_hint

SHAPES = ("best-first", "chain", "k-ary")


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
    prompts.add_argument("--chat", action="store_true", help="chat: one line of input per message")
    add("--limit", type=positive, metavar="N", help="only the first N rows of --input")
    add("--max-tokens", type=positive, metavar="N", help="default: the application's")
    add("--backend", metavar="NAME", help=f"{', '.join(BACKENDS)} (default: MLX where it can run)")
    add("--dtype", choices=sorted(set(sum(DTYPES.values(), ()))), help="what the back end computes in")
    add("--quantize", choices=QUANTIZATIONS, help="MLX: pack the base to affine 4 or 8 bits, or mxfp4")
    add("--compute-units", choices=tuple(COMPUTE_UNITS), help="engines that Core ML may use (default all)")
    add_device(parser, "--backend reference")
    add("--kv-bits", type=int, choices=KV_BITS, help="MLX: keep keys and values in 4 or 8 bits")
    add_cache_options(parser)
    add("--plain", action="store_true", help="no drafts: one token per call")
    add("--nodes", type=positive, metavar="N", help="tree nodes per call (default: the bundle's)")
    add("--shape", choices=SHAPES, help="how the tree is grown (default: best-first)")
    add("--tree-top-k", type=positive, default=3, metavar="K", help="children per node of a k-ary tree")
    add(
        "--lookup",
        action="store_true",
        help="prompt lookup: n-grams of prompt and output compete for the tree's nodes",
    )
    add("--show-steps", action="store_true", help="draw every model call")
    add("--json", action="store_true", help="print one JSON object per prompt")
    add_sampling_options(parser)
    return parser


def generate_command(arguments: argparse.Namespace) -> None:
    """Body of the command."""
    if arguments.backend is not None:
        check_backend(arguments.backend, arguments.dtype)
    if arguments.plain and arguments.nodes not in (None, 1):
        raise UserError("--plain is one node per call; leave --nodes out")
    if arguments.no_adapter and (arguments.adapter or arguments.backend not in (None, "mlx")):
        raise UserError("--no-adapter is the base alone on MLX; leave --adapter and other back ends out")
    if arguments.no_adapter and not arguments.lookup and (arguments.nodes or arguments.shape):
        raise UserError("--no-adapter drafts nothing without --lookup; leave --nodes and --shape out")
    check_cache_options(arguments)
    if arguments.chat and (arguments.json or arguments.show_steps):
        raise UserError("--chat writes text only; leave --json and --show-steps out")
    sampler = sampler_from_options(arguments)
    bundle = open_bundle(arguments.bundle)
    adapter = plain_base(bundle.manifest) if arguments.no_adapter else bundle.adapter(arguments.adapter)
    tokenizer = load_tokenizer(bundle)
    if arguments.chat:
        session = open_session(bundle, adapter, tokenizer, arguments, sampler)
        _say(session.hint)
        return talk(session, ChatPrompt(bundle.path, tokenizer), arguments.prompt_cache)
    prompts = []
    for text in read_prompts(arguments, adapter):
        with row_errors(arguments.input, len(prompts)):
            prompts.append(tokenizer.encode(text))
    session = open_session(bundle, adapter, tokenizer, arguments, sampler)
    _check_prompts(session, prompts, arguments.input)
    _say(session.hint)
    results: list[Result] = []
    for ids in prompts:
        records, result = run_prompt(session, ids, arguments.show_steps, arguments.json)
        results.append(result)
        if not arguments.json and not arguments.show_steps:
            print(totals_text(records, result), file=sys.stderr)
    if arguments.prompt_cache:
        session.model.text.save(arguments.prompt_cache)
    if len(results) > 1 and not arguments.json:
        print(_overall(results), file=sys.stderr)


def _say(line: str | None) -> None:
    if line:
        print(line, file=sys.stderr)


def read_prompts(arguments: argparse.Namespace, adapter: BundledAdapter) -> list[str]:
    """Prompt texts of the command line or of the rows of --input."""
    if arguments.prompt is not None:
        return [arguments.prompt]
    return [text for _, text in prompts_from_file(arguments.input, adapter.prompt, arguments.limit)]


def open_session(
    bundle: Bundle,
    adapter: BundledAdapter,
    tokenizer: BundleTokenizer,
    arguments: argparse.Namespace,
    sampler: Sampler | None = None,
) -> Session:
    """Check the request and load the back end it names."""
    name = arguments.backend or ("mlx" if arguments.no_adapter else default_backend(bundle, adapter))
    check_backend(name, arguments.dtype)
    tuned = _tuned(bundle, adapter, name, arguments)
    drafter = tuned.drafter(bundle.bigram_bias(adapter)) if tuned else _drafter(bundle, adapter, arguments)
    if arguments.prompt_cache and name != "mlx":
        raise UserError(f"--prompt-cache holds keys and values of MLX, not of back end '{name}'")
    rows = fastest_stream_rows(adapter, drafter.num_nodes)
    kept = (tuned.num_kept or adapter.num_nodes) if tuned else None
    model = open_backend(
        name,
        bundle,
        adapter,
        arguments.dtype,
        rows,
        quantize=arguments.quantize,
        compute_units=arguments.compute_units,
        num_kept=kept,
        kv_bits=arguments.kv_bits,
        device=arguments.device,
    )
    messages: list[dict] = []
    if name == "mlx" and (arguments.chat or arguments.prompt_cache):
        dtype = arguments.dtype or default_dtype(name)
        model, messages = with_cache(model, bundle, adapter, dtype, arguments)
    return Session(
        model=model,
        messages=messages,
        drafter=drafter,
        tokenizer=tokenizer,
        adapter=adapter,
        stop_ids=frozenset(bundle.manifest.architecture.eos_ids),
        max_tokens=arguments.max_tokens or adapter.max_tokens,
        sampler=sampler,
        hint=None if tuned else _hint(bundle, adapter, name, arguments),
    )


def _tuned(
    bundle: Bundle, adapter: BundledAdapter, backend: str, arguments: argparse.Namespace
) -> DraftChoice | AdaptiveChoice | None:
    """What ss-bench tune chose on this device, where no option asks for drafts."""
    if backend != "mlx" or _asks_for_drafts(arguments) or not has_streams(adapter):
        return None
    return read_tuning(bundle, adapter.app, arguments.dtype or default_dtype(backend))


def _hint(
    bundle: Bundle, adapter: BundledAdapter, backend: str, arguments: argparse.Namespace
) -> str | None:
    """A hint when drafts were neither asked for nor tuned for this device."""
    if backend != "mlx" or _asks_for_drafts(arguments) or not has_streams(adapter):
        return None
    return untuned_hint(bundle, [adapter.app]) if drafts_need_tuning() else None


def _asks_for_drafts(arguments: argparse.Namespace) -> bool:
    return bool(arguments.plain or arguments.nodes or arguments.shape or arguments.lookup)


def _drafter(bundle: Bundle, adapter: BundledAdapter, arguments: argparse.Namespace) -> Drafter:
    """The draft that the options ask for, or the bundle's."""
    if not has_streams(adapter) and not arguments.lookup:
        return Drafter(1)
    nodes = 1 if arguments.plain else (arguments.nodes or adapter.num_nodes)
    if nodes > adapter.num_nodes:
        raise UserError(f"--nodes {nodes}: the bundle was made for at most {adapter.num_nodes} nodes")
    lookup = PromptLookup() if arguments.lookup else None
    shape, streams = arguments.shape or "best-first", has_streams(adapter) or nodes == 1
    bias = bundle.bigram_bias(adapter)
    return Drafter(nodes, shape, arguments.tree_top_k, bias, lookup=lookup, use_streams=streams)


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
