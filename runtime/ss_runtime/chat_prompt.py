"""From chat messages to a prompt: the base's own template, or the contents one after the other."""

from __future__ import annotations

from pathlib import Path

from ss_device.chat_template import read_chat_template
from ss_device.template_process import TemplateProcess
from ss_runtime.tokenization import BundleTokenizer


class ChatPrompt:
    """Renders messages, dicts with `role` and `content` (text), to token ids.

    The template is the bundle's `chat_template.jinja` or the one in `tokenizer_config.json`; `template`
    is None where the base has none. Contents are then joined by line breaks, each one as it is, so that an
    application's prompt can be sent as one message.
    """

    def __init__(self, folder: Path, tokenizer: BundleTokenizer) -> None:
        self._tokenizer = tokenizer
        found = read_chat_template(folder)
        self.template: str | None = found.template if found else None
        self._process = TemplateProcess(found) if found else None

    def text(self, messages: list[dict], open_next: bool = True) -> str:
        """The prompt text. Raises UserError when the template fails.

        open_next: up to where the assistant writes, not to the end of the last message.
        """
        if self._process is None:
            return "\n".join(message["content"] for message in messages)
        return self._process.render(messages, open_next)

    def ids(self, messages: list[dict], open_next: bool = True) -> list[int]:
        """Token ids, with one BOS even where the template writes it too."""
        ids = self._tokenizer.encode(self.text(messages, open_next))
        bos = self._tokenizer.bos_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids
