"""`ss-generate --chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path

from ss_device.errors import UserError, one_line
from ss_runtime.chat_prompt import ChatPrompt
from ss_runtime.commands.display import totals_text
from ss_runtime.commands.session import Session, run_prompt


def talk(session: Session, chat: ChatPrompt, cache: Path | None = None) -> None:
    """Answer lines of standard input until it ends. Every prompt holds the conversation so far.

    cache: where the conversation and its keys and values are saved after every answer (an MLX session). A
    message that does not fit (a full context, a template that refuses it) is reported and left out.
    """
    if chat.template is None:
        print("this base has no chat template: messages are joined by line breaks", file=sys.stderr)
    messages = list(session.messages)
    if messages:
        print(f"continuing a conversation of {len(messages)} messages", file=sys.stderr)
    while (line := _read_line()) is not None:
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            text = _answer(session, chat.ids(messages))
        except UserError as error:
            messages.pop()
            print(f"error: {one_line(error)}", file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": text})
        if cache is not None:
            session.model.text.save(cache, messages)


def _read_line() -> str | None:
    """One message; None at the end of the input."""
    if sys.stdin.isatty():
        try:
            return input("> ")
        except EOFError:
            print()
            return None
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _answer(session: Session, ids: list[int]) -> str:
    records, result = run_prompt(session, ids)
    print(totals_text(records, result), file=sys.stderr)
    return result.text
