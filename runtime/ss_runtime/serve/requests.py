"""Requests of the OpenAI API: JSON bodies checked and turned into what the engine needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ss_device.errors import UserError
from ss_device.sampling import Sampler
from ss_runtime.samplers import build_sampler
from ss_runtime.serve.printable import printable

# Fields that change the answer and that this server does not have: refused unless they say nothing.
UNSUPPORTED = {
    "n": (None, 1),
    "best_of": (None, 1),
    "logprobs": (None, False, 0),
    "top_logprobs": (None, 0),
    "echo": (None, False),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
}
# Fields that are read; others are ignored.
FIELDS = frozenset(UNSUPPORTED) | {
    *(
        "model",
        "messages",
        "prompt",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "stream",
        "stream_options",
    ),
    *("temperature", "top_p", "top_k", "min_p", "seed", "lossy_typical"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
}
MAX_STOPS, MAX_STOP_LENGTH = 4, 1000


class RequestError(Exception):
    """A request that gets an error as its answer: HTTP status, OpenAI error type, one printable line."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind, self.message = status, kind, printable(message)

    def to_dict(self) -> dict:
        return {"error": {"message": self.message, "type": self.kind, "param": None, "code": self.status}}


def bad_request(message: str) -> RequestError:
    return RequestError(400, "invalid_request_error", message)


@dataclass(frozen=True)
class GenerationRequest:
    """A checked request. Exactly one of `messages` (chat) and `prompt` (text or token ids) is set."""

    model: str | None
    messages: list[dict] | None
    prompt: str | list[int] | None
    max_tokens: int | None
    stop_strings: tuple[str, ...]
    sampler: Sampler | None
    stream: bool
    stream_usage: bool


@dataclass(frozen=True)
class RequestLimits:
    """Ids lie below vocab_size; context: most tokens of a prompt; max_tokens: most to be asked for."""

    vocab_size: int
    context: int
    max_tokens: int


def parse_request(body: object, chat: bool, limits: RequestLimits) -> GenerationRequest:
    """Check a decoded JSON body. Raises RequestError."""
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    for name, harmless in UNSUPPORTED.items():
        if body.get(name) not in harmless:
            raise bad_request(f"'{name}' is not supported by this server")
    wanted = _typed(body, "max_completion_tokens", int)
    wanted = _typed(body, "max_tokens", int) if wanted is None else wanted
    if wanted is not None and not 1 <= wanted <= limits.max_tokens:
        raise bad_request(f"'max_tokens' must lie between 1 and {limits.max_tokens}")
    options = _typed(body, "stream_options", dict) or {}
    return GenerationRequest(
        model=_typed(body, "model", str),
        messages=_messages(body) if chat else None,
        prompt=None if chat else _prompt(body, limits),
        max_tokens=wanted,
        stop_strings=_stops(body),
        sampler=_sampler(body),
        stream=bool(_typed(body, "stream", bool)),
        stream_usage=bool(options.get("include_usage")),
    )


def _typed(body: dict, name: str, kind: type | tuple):
    """A field of the body, None where it is missing or null."""
    value = body.get(name)
    if value is None:
        return None
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise bad_request(f"'{name}' is {type(value).__name__}, expected {kinds[0].__name__}")
    return value


def _number(body: dict, name: str) -> float | None:
    """A finite number of the body; JSON's whole numbers have no bound, floats do."""
    value = _typed(body, name, (float, int))
    try:
        if value is None or math.isfinite(value):
            return None if value is None else float(value)
    except OverflowError:
        pass
    raise bad_request(f"'{name}' is not a finite number")


def _whole(body: dict, name: str) -> int | None:
    """A whole number of the body that 64 bits hold."""
    value = _typed(body, name, int)
    if value is not None and abs(value) >= 1 << 64:
        raise bad_request(f"'{name}' must lie within 64 bits")
    return value


def _messages(body: dict) -> list[dict]:
    messages = _typed(body, "messages", list)
    if not messages:
        raise bad_request("'messages' must hold at least one message")
    return [_message(message, index) for index, message in enumerate(messages)]


def _message(message: object, index: int) -> dict:
    """One message with its content as text; a list of text parts is joined."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise bad_request(f"messages[{index}] needs a 'role' and a 'content'")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            raise bad_request(f"messages[{index}]: only text parts are supported")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise bad_request(f"messages[{index}]: 'content' must be text")
    return {"role": message["role"], "content": content}


def _prompt(body: dict, limits: RequestLimits) -> str | list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and len(prompt) > limits.context:
        raise bad_request(f"the prompt has {len(prompt)} tokens, the context holds {limits.context}")
    vocab = limits.vocab_size
    if isinstance(prompt, list) and prompt and all(type(t) is int and 0 <= t < vocab for t in prompt):
        return prompt
    raise bad_request(f"'prompt' must be one text or one list of token ids below {vocab}")


def _stops(body: dict) -> tuple[str, ...]:
    stops = body.get("stop")
    if stops is None:
        return ()
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise bad_request("'stop' must be a text or a list of texts")
    if len(stops) > MAX_STOPS:
        raise bad_request(f"'stop' has {len(stops)} texts, at most {MAX_STOPS} are taken")
    if any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise bad_request(f"'stop': a text has more than {MAX_STOP_LENGTH} characters")
    return tuple(stops)


def _sampler(body: dict) -> Sampler | None:
    """Greedy unless a temperature is given. `lossy_typical` is this project's addition."""
    temperature = _number(body, "temperature") or 0.0
    settings = {
        name: value
        for name, value in (
            ("top_p", _number(body, "top_p")),
            ("top_k", _whole(body, "top_k")),
            ("min_p", _number(body, "min_p")),
            ("seed", _whole(body, "seed")),
        )
        if value is not None
    }
    if temperature == 0:
        settings = {}  # clients send top_p 1 and the like with greedy requests
    penalties = {name: _number(body, f"{name}_penalty") for name in ("repetition", "presence", "frequency")}
    lossy = _number(body, "lossy_typical")
    try:
        return build_sampler(temperature, settings, penalties, lossy)
    except UserError as error:
        raise bad_request(str(error)) from error
