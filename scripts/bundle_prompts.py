"""Prompts of a bundle's applications from their test files, for the scripts that question a runtime."""

from __future__ import annotations

from pathlib import Path

from ss_device.bundle import Bundle
from ss_device.command_line import prompts_from_file
from ss_device.errors import UserError
from ss_runtime.tokenization import load_tokenizer


def bundle_prompts(
    bundle: Bundle, pattern: str, count: int, context: int | None = None
) -> dict[str, list[list[int]]]:
    """By adapter: token ids of the first `count` prompts of its file that leave room for an answer.

    pattern: path of a JSON lines file with `{app}` in it; context: what prompt and answer fit into, by
    default the base's. Raises UserError for too few rows.
    """
    tokenizer, found = load_tokenizer(bundle), {}
    context = context or bundle.manifest.architecture.default_context
    for name, adapter in sorted(bundle.manifest.adapters.items()):
        file = Path(pattern.replace("{app}", name))
        rows = (tokenizer.encode(text) for _, text in prompts_from_file(file, adapter.prompt, 2 * count))
        fitting = [ids for ids in rows if len(ids) + adapter.max_tokens <= context][:count]
        if len(fitting) < count:
            raise UserError(f"{file}: {len(fitting)} of {2 * count} prompts fit, {count} are wanted")
        found[name] = fitting
    return found
