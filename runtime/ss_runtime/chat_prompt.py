"""From chat messages to a prompt: the base's own template, or the contents one after the other."""

from __future__ import annotations

from pathlib import Path

from ss_device.errors import UserError, one_line
from ss_device.strict_json import read_json
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
        self.template: str | None = config.get("chat_template")
        if (folder / TEMPLATE_FILE).is_file():
            self.template = (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
        if isinstance(self.template, list):  # several named ones
            self.template = next((t["template"] for t in self.template if t["name"] == "default"), None)
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        self._special = {name: _token_text(config.get(name)) for name in names}

    def text(self, messages: list[dict]) -> str:
        """The prompt text, up to where the assistant writes. Raises UserError when the template fails."""
        if self.template is None:
            return "\n".join(message["content"] for message in messages)
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        try:
            template = environment.from_string(self.template)
            return template.render(messages=messages, add_generation_prompt=True, **self._special)
        except TemplateError as error:
            raise UserError(
                f"the base's chat template refuses these messages: {one_line(error)}"
            ) from error

    def ids(self, messages: list[dict]) -> list[int]:
        """Token ids, with one BOS even where the template writes it too."""
        ids = self._tokenizer.encode(self.text(messages))
        bos = self._tokenizer.bos_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def _token_text(token: object) -> str:
    """A special token's text; older files wrap it in an object."""
    if isinstance(token, dict):
        return str(token.get("content", ""))
    return str(token) if token is not None else ""
