"""The chat template of a base model's tokenizer, for applications with `template = "tokenizer"`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ss_device.application import Application, load_application
from ss_device.base_model import BaseFolder, open_base
from ss_device.chat_template import read_chat_template
from ss_device.conversation import Message
from ss_device.errors import UserError
from ss_device.template_process import TemplateProcess


def with_tokenizer_template(app: Application, base: Path) -> Application:
    """`app` with its conversations rendered by the base's own template where app.toml asks for it.

    Raises UserError when the base's tokenizer has none.
    """
    if app.chat is None or not app.chat.from_tokenizer:
        return app
    found = read_chat_template(base)
    if found is None:
        raise UserError(f"{base}: the tokenizer has no chat template; give the turns in app.toml")
    process = TemplateProcess(found)

    def render(messages: list[Message], open_next: bool) -> str:
        return process.render([{"role": m.role, "content": m.content} for m in messages], open_next)

    return replace(app, chat=replace(app.chat, render=render))


def application_and_base(app: str | Path | Application, base: str | Path) -> tuple[Application, BaseFolder]:
    """An application (itself, by name or by path) as a base renders it, and the base (`open_base`)."""
    found = app if isinstance(app, Application) else load_application(str(app))
    folder = open_base(base)
    return with_tokenizer_template(found, folder.path), folder
