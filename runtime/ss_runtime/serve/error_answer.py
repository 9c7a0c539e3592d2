"""A refusal as the HTTP answer that clients of the OpenAI API understand."""

from __future__ import annotations

from starlette.responses import JSONResponse

from ss_runtime.serve.requests import RequestError

HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}


def error_answer(error: RequestError, headers: dict[str, str] | None = None) -> JSONResponse:
    """Status and JSON of an error, with the headers that belong to its status."""
    return JSONResponse(error.to_dict(), error.status, headers or HEADERS.get(error.status))
