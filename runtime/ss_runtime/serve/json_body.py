"""The JSON body of a request: read no further than a limit, decoded strictly."""

from __future__ import annotations

from typing import Any, TypedDict

import msgspec
from starlette.requests import Request

from ss_runtime.serve.requests import FIELDS, RequestError, bad_request

PROMPTS = ("messages", "prompt")
SHORT = 1 << 16  # bytes of a field that is read whatever its type
_Fields = TypedDict("_Fields", dict.fromkeys(FIELDS, msgspec.Raw), total=False)


class _Part(TypedDict):
    text: str


class _Message(TypedDict):
    role: str
    content: str | list[_Part]


async def read_body(request: Request, limit: int) -> bytes:
    """The body's bytes. Raises RequestError 413 beyond `limit` bytes, ClientDisconnect when it is cut off.

    A length that is announced too large is refused before a byte is read.
    """
    too_large = RequestError(413, "invalid_request_error", f"the body is larger than {limit} bytes")
    if int(request.headers.get("content-length") or 0) > limit:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise too_large
    return bytes(body)


def decode_json(body: bytes) -> dict:
    """The fields of a body that this server knows. Raises RequestError 400 for what is no JSON object (nor
    are NaN and half a surrogate pair), nests beyond Python's stack, or holds numbers of over 4300 digits.

    Other fields are skipped, not built, and long ones are read by their types: a megabyte of `[],` would
    hold Python's lock for a tenth of a second.
    """
    raws = _decode(body, _Fields, "the body must be a JSON object")
    sizes = {name: len(memoryview(raw)) for name, raw in raws.items()}
    if sum(size for name, size in sizes.items() if name not in PROMPTS) > SHORT:
        raise bad_request(f"the fields beside {' and '.join(PROMPTS)} take more than {SHORT} bytes")
    wrong = "'{}' holds a number that is not finite or has over 4300 digits"
    short = {n: _decode(raw, Any, wrong.format(n)) for n, raw in raws.items() if sizes[n] <= SHORT}
    return short | {n: _decode_long(n, bytes(raw)) for n, raw in raws.items() if n not in short}


def _decode_long(name: str, raw: bytes) -> object:
    """A prompt or messages of many bytes: wrong at the first element that is wrong."""
    if name == "messages":
        kind, wrong = list[_Message], "'messages' must be a list of objects with 'role' and 'content'"
    else:
        wrong = "'prompt' must be one text or one list of token ids"
        inner = raw[1:].lstrip()[:1] if raw[:1] == b"[" else b""
        kind = {b'"': tuple[str], b"[": tuple[list[int]]}.get(inner, str | list[int])
    value = _decode(raw, kind, wrong)
    return list(value) if isinstance(value, tuple) else value


def _decode(raw: bytes | msgspec.Raw, kind: Any, wrong_type: str) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise bad_request(wrong_type) from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise bad_request("the body is not valid JSON") from error
