"""The chat template of a base model's or a bundle's folder, and the special tokens that it may name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ss_device.errors import UserError
from ss_device.strict_json import read_json

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template. special: the text of special tokens by name, "" for one that there is not."""

    template: str
    special: dict[str, str]


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """`chat_template.jinja` of the folder, else the template in `tokenizer_config.json`; None without.

    Raises UserError for a template that is no text.
    """
    file = folder / CONFIG_FILE
    config = read_json(file) if file.is_file() else {}
    template = config.get("chat_template")
    if (folder / TEMPLATE_FILE).is_file():
        template = _text_of(folder / TEMPLATE_FILE)
    if isinstance(template, list):  # several named ones
        entries = [t for t in template if isinstance(t, dict)]
        template = next((t.get("template") for t in entries if t.get("name") == "default"), None)
    if template is None:
        return None
    if not isinstance(template, str):
        raise UserError(f"{file}: chat_template is {type(template).__name__}, expected text")
    return ChatTemplate(template, {name: _token_text(config.get(name)) for name in SPECIAL_TOKENS})


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason})") from error


def _token_text(token: object) -> str:
    """A special token's text; older files wrap it in an object."""
    if isinstance(token, dict):
        return str(token.get("content", ""))
    return str(token) if token is not None else ""
