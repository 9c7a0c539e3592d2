"""The JSON body of a request: read no further than a limit, decoded strictly."""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from ss_runtime.serve.requests import RequestError, bad_request


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


def decode_json(body: bytes) -> object:
    """The value of a body in UTF-8. Raises RequestError 400 for what JSON does not allow (NaN, half a
    surrogate pair), for nesting beyond Python's stack, and for numbers beyond floats and 4300 digits.
    """
    try:
        return msgspec.json.decode(body)
    except msgspec.ValidationError as error:
        raise bad_request("a number in the JSON body is not finite, or has over 4300 digits") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise bad_request("the body is not valid JSON") from error
