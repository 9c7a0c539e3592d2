"""`ss-generate --chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from dataclasses import replace

from ss_device.decoding import StepModel
from ss_device.errors import UserError, one_line
from ss_runtime.chat_prompt import ChatPrompt
from ss_runtime.display import totals_text
from ss_runtime.generate_command import Session, run_prompt


def talk(session: Session, chat: ChatPrompt) -> None:
    """Answer lines of standard input until it ends. Every prompt holds the conversation so far.

    A message that does not fit (a full context, a template that refuses it) is reported and left out.
    """
    if chat.template is None:
        print("this base has no chat template: messages are joined by line breaks", file=sys.stderr)
    session = replace(session, model=_remembering(session.model))
    messages: list[dict] = []
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


def _remembering(model: StepModel) -> StepModel:
    """An MLX model that computes only what is new since the last message; others as they are."""
    try:
        from ss_runtime.mlx_model import MLXStepModel
        from ss_runtime.prompt_cache import CachedText, ReusingModel
    except ImportError:
        return model
    return (
        ReusingModel(model, CachedText("conversation", model.cache))
        if isinstance(model, MLXStepModel)
        else model
    )
