"""Conversations as text: messages of a data row, and the pieces of text that turns are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ss_device.errors import UserError

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
}


@dataclass(frozen=True)
class Piece:
    """A piece of text. A generated one is what the model has to write, up to its end token."""

    text: str
    generated: bool


@dataclass(frozen=True)
class Message:
    """One turn. role: system, user or assistant."""

    role: str
    content: str


def read_messages(row: dict) -> list[Message]:
    """Messages of a row: ShareGPT's `conversations` [{from, value}] or `messages` [{role, content}].

    Raises UserError that says which turn is wrong, or that no assistant turn is there to learn from.
    """
    if "conversations" in row:
        field, role_key, text_key = "conversations", "from", "value"
    elif "messages" in row:
        field, role_key, text_key = "messages", "role", "content"
    else:
        found = ", ".join(row) or "none"
        raise UserError(f"the row has no field 'conversations' or 'messages' (found {found})")
    turns = row[field]
    if not isinstance(turns, list) or not turns:
        raise UserError(f"field '{field}' is not a list of turns with at least one")
    messages = [_message(t, f"{field}[{i}]", role_key, text_key) for i, t in enumerate(turns)]
    if not any(m.role == "assistant" for m in messages):
        raise UserError(f"field '{field}' has no assistant turn")
    return messages


def _message(turn: object, where: str, role_key: str, text_key: str) -> Message:
    if not isinstance(turn, dict):
        raise UserError(f"{where} is {type(turn).__name__}, expected an object")
    for key in (role_key, text_key):
        if not isinstance(turn.get(key), str):
            found = type(turn[key]).__name__ if key in turn else f"only {', '.join(turn) or 'nothing'}"
            raise UserError(f"{where} has no text '{key}' (found {found})")
    if turn[role_key] not in ROLES:
        raise UserError(f"{where}: role '{turn[role_key]}' is not one of {', '.join(ROLES)}")
    return Message(ROLES[turn[role_key]], turn[text_key])


@dataclass(frozen=True)
class TurnTemplate:
    """How turns become text: a (before, after) pair for each role, around the content.

    An assistant turn's content is generated and followed by the model's end token, then by `after`.
    render: set for `template = "tokenizer"`, the tokenizer's own chat template as a function of
    messages and of whether the next assistant turn is to be opened (`training.chat_template`).
    """

    affixes: dict[str, tuple[str, str]]
    from_tokenizer: bool = False
    render: Callable[[list[Message], bool], str] | None = None

    @staticmethod
    def from_dict(raw: dict) -> TurnTemplate:
        """From the `[chat]` table: `template = "tokenizer"`, or `user = [before, after]` and so on."""
        if raw.get("template") == "tokenizer":
            return TurnTemplate({}, from_tokenizer=True)
        affixes = {}
        for role in ("system", "user", "assistant"):
            pair = raw.get(role, ["", ""] if role == "system" else None)
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(p, str) for p in pair):
                raise UserError(f"chat.{role} is not a pair of texts [before, after]")
            affixes[role] = (pair[0], pair[1])
        return TurnTemplate(affixes)

    def pieces(self, messages: list[Message]) -> list[Piece]:
        """Alternating given and generated pieces, given first (it may be empty).

        What follows the last assistant turn is dropped: nothing there is learnt or asked.
        """
        return self._rendered(messages) if self.from_tokenizer else self._affixed(messages)

    def _affixed(self, messages: list[Message]) -> list[Piece]:
        pieces, given = [], ""
        for message in messages:
            before, after = self.affixes[message.role]
            if message.role == "assistant":
                pieces += [Piece(given + before, False), Piece(message.content, True)]
                given = after
            else:
                given += before + message.content + after
        return pieces

    def _rendered(self, messages: list[Message]) -> list[Piece]:
        if self.render is None:
            raise UserError("the tokenizer's chat template is asked for but no base model is named")
        pieces, done = [], ""
        for count, message in enumerate(messages):
            if message.role != "assistant":
                continue
            opened = self.render(messages[:count], True)
            whole = self.render(messages[: count + 1], False)
            if not opened.startswith(done) or not whole.startswith(opened):
                raise UserError(
                    f"the tokenizer's chat template rewrites text before turn {count + 1}; "
                    "give the turns in app.toml instead"
                )
            pieces += [Piece(opened[len(done) :], False), Piece(whole[len(opened) :], True)]
            done = whole
        return pieces
