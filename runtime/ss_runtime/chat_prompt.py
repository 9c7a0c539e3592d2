"""From chat messages to a prompt: the base's own template, or the contents one after the other."""

from __future__ import annotations

from pathlib import Path

from ss_device.errors import UserError
from ss_device.strict_json import read_json
from ss_runtime.template_process import TemplateProcess
from ss_runtime.tokenization import BundleTokenizer

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"


class ChatPrompt:
    """Renders messages, dicts with `role` and `content` (text), to token ids.

    The template is the bundle's `chat_template.jinja` or the one in `tokenizer_config.json`; `template`
    is None where the base has none. Contents are then joined by line breaks, each one as it is, so that an
    application's prompt can be sent as one message.
    """

    def __init__(self, folder: Path, tokenizer: BundleTokenizer) -> None:
        self._tokenizer = tokenizer
        config = read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
        template = config.get("chat_template")
        if (folder / TEMPLATE_FILE).is_file():
            template = _text_of(folder / TEMPLATE_FILE)
        if isinstance(template, list):  # several named ones
            entries = [t for t in template if isinstance(t, dict)]
            template = next((t.get("template") for t in entries if t.get("name") == "default"), None)
        if template is not None and not isinstance(template, str):
            found = type(template).__name__
            raise UserError(f"{folder / CONFIG_FILE}: chat_template is {found}, expected text")
        self.template: str | None = template
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special = {name: _token_text(config.get(name)) for name in names}
        self._process = TemplateProcess(self.template, special) if self.template is not None else None

    def text(self, messages: list[dict]) -> str:
        """The prompt text, up to where the assistant writes. Raises UserError when the template fails."""
        if self._process is None:
            return "\n".join(message["content"] for message in messages)
        return self._process.render(messages)

    def ids(self, messages: list[dict]) -> list[int]:
        """Token ids, with one BOS even where the template writes it too."""
        ids = self._tokenizer.encode(self.text(messages))
        bos = self._tokenizer.bos_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


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
