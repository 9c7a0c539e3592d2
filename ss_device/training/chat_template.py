"""The chat template of a base model's tokenizer, for applications with `template = "tokenizer"`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ss_device.application import Application
from ss_device.conversation import Message
from ss_device.errors import UserError, library_errors
from ss_device.native_output import native_output_dropped


def with_tokenizer_template(app: Application, base: Path) -> Application:
    """`app` with its conversations rendered by the base's own template where app.toml asks for it.

    Raises UserError when the base's tokenizer has none.
    """
    if app.chat is None or not app.chat.from_tokenizer:
        return app
    from transformers import PreTrainedTokenizerFast

    with library_errors(f"{base}: transformers cannot read this tokenizer"), native_output_dropped():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    if not tokenizer.chat_template:
        raise UserError(f"{base}: the tokenizer has no chat template; give the turns in app.toml")

    def render(messages: list[Message], open_next: bool) -> str:
        raw = [{"role": m.role, "content": m.content} for m in messages]
        with library_errors("the tokenizer's chat template refuses"):
            return tokenizer.apply_chat_template(raw, tokenize=False, add_generation_prompt=open_next)

    return replace(app, chat=replace(app.chat, render=render))
