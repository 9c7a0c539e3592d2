"""Access to the application: middleware that refuses a request before any of its body is read."""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ss_runtime.serve.access_rules import AccessRules
from ss_runtime.serve.error_answer import error_answer
from ss_runtime.serve.requests import RequestError

OPEN_ROUTES = {"/health"}
JSON = "application/json"


class Checked:
    """Passes on the requests for which `check` raises no RequestError."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope, Headers], None]) -> None:
        self.app, self.check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self.check(scope, Headers(scope=scope))
            except RequestError as error:
                await error_answer(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def access_middleware(rules: AccessRules) -> list[Middleware]:
    """Host and origin first; then answers to preflights, which carry no key; then key and content type."""

    def check_sender(scope: Scope, headers: Headers) -> None:
        if not rules.host_fits(headers.get("host")):
            host = headers.get("host", "")
            message = f"this server does not answer to the host '{host}' (ss-serve --allow-host)"
            raise RequestError(421, "invalid_request_error", message)
        if not rules.origin_fits(headers.get("origin")):
            message = f"pages of '{headers['origin']}' may not call this server (ss-serve --allow-origin)"
            raise RequestError(403, "permission_error", message)

    def check_admission(scope: Scope, headers: Headers) -> None:
        if scope["path"] not in OPEN_ROUTES and not rules.key_fits(headers.get("authorization")):
            raise RequestError(401, "authentication_error", "a valid API key is needed (Bearer)")
        # No page can send this type to another site without a preflight; an empty body needs it too.
        if scope["method"] == "POST" and _media_type(headers) != JSON:
            raise RequestError(415, "invalid_request_error", f"a POST needs 'Content-Type: {JSON}'")

    cors = Middleware(
        CORSMiddleware,
        allow_origins=sorted(rules.origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
    )
    pages = [cors] if rules.origins else []
    return [Middleware(Checked, check=check_sender), *pages, Middleware(Checked, check=check_admission)]


def _media_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()
