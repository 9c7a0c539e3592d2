"""Options of `ss-generate` for a prompt cache in a file: loaded, trimmed, saved."""

from __future__ import annotations

import argparse
from pathlib import Path

from ss_device.bundle import Bundle, BundledAdapter
from ss_device.command_line import positive
from ss_device.errors import UserError
from ss_device.outputs import check_writable
from ss_device.step_model import StepModel


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """The options that the other functions read."""
    parser.add_argument(
        "--prompt-cache",
        type=Path,
        metavar="FILE",
        help="load the keys and values of an earlier text if FILE exists and save them at the end (MLX); "
        "--chat continues the conversation",
    )
    parser.add_argument(
        "--trim-cache", type=positive, metavar="N", help="keep only the first N tokens of --prompt-cache"
    )


def check_cache_options(arguments: argparse.Namespace) -> None:
    """Refuse options that cannot be met, before anything is loaded."""
    file = arguments.prompt_cache
    if file is None and arguments.trim_cache:
        raise UserError("--trim-cache needs --prompt-cache")
    if file is None:
        return
    check_writable(file)
    if arguments.trim_cache and not file.exists():
        raise UserError(f"{file}: no such file to trim")


def with_cache(
    model: StepModel, bundle: Bundle, adapter: BundledAdapter, dtype: str, arguments: argparse.Namespace
) -> tuple[StepModel, list[dict]]:
    """An MLX model that reuses the prefix shared with the previous text, and the messages of its file."""
    from ss_runtime.mlx.prompt_cache import CachedText, ReusingModel, cache_content

    content = cache_content(bundle, adapter, dtype, arguments.quantize, arguments.kv_bits)
    text = CachedText(content, model.cache)
    file, messages = arguments.prompt_cache, []
    if file is not None and file.exists():
        messages = text.load(file, model.limits.context, model.limits.vocab_size)
    if arguments.trim_cache:
        text.trim(arguments.trim_cache)
        messages = []
    return ReusingModel(model, text), messages
