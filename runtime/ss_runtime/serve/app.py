"""The HTTP application: routes of the OpenAI API over an Engine."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ss_runtime.serve.access import access_middleware
from ss_runtime.serve.access_rules import AccessRules
from ss_runtime.serve.engine import ClientGone, Engine, Usage
from ss_runtime.serve.error_answer import error_answer
from ss_runtime.serve.json_body import decode_json, read_body
from ss_runtime.serve.printable import printable
from ss_runtime.serve.requests import GenerationRequest, RequestError, RequestLimits, parse_request

CLIENT_CLOSED = 499  # nginx's code; nobody reads the answer
INTERNAL = RequestError(500, "server_error", "internal error; the server's log has the traceback")
log = logging.getLogger(__name__)


class Service:
    """The endpoints. Arguments as in `make_app`."""

    def __init__(
        self, engine: Engine, body_limit: int, max_tokens: int, rules: AccessRules, report_cached: bool
    ) -> None:
        self.engine, self.body_limit, self.rules = engine, body_limit, rules
        vocab = engine.bundle.manifest.architecture.vocab_size
        self.limits = RequestLimits(vocab, engine.prompts.context, max_tokens)
        self.report_cached = report_cached

    async def health(self, request: Request) -> Response:
        """Status; with the API key, or where none is asked for, back end, memory in bytes, requests."""
        if not self.rules.key_fits(request.headers.get("authorization")):
            return JSONResponse({"status": "ok"})
        bank = self.engine.bank
        caches = bank.prompt_caches()
        if not self.report_cached:  # how long somebody's text is
            caches = [{"bytes": cache["bytes"]} for cache in caches]
        memory = {
            "base": bank.base_bytes,
            "adapters": bank.memory(),
            "prompt_caches": caches,
            **bank.device_memory(),
        }
        about = {"status": "ok", **self.engine.runs_on, "memory": memory}
        return JSONResponse({**about, "requests": self.engine.present})

    async def models(self, request: Request) -> Response:
        """The loaded adapters and, on MLX, the base alone, as models."""
        data = [self._about(name) for name in self.engine.bank.models]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """One of them."""
        name = request.path_params["name"]
        self.engine.resident(name)
        return JSONResponse(self._about(name))

    def _about(self, name: str) -> dict:
        about = {"id": name, "object": "model", "created": self.engine.started, "owned_by": "ss-device"}
        return {**about, **self.engine.runs_on}

    async def adapters(self, request: Request) -> Response:
        """The bundle's adapters: which are loaded, and what they weigh in bytes beside the base."""
        bank = self.engine.bank
        memory = bank.memory()
        names = sorted({*bank.bundle.manifest.adapters, *memory})
        data = [{"id": n, "loaded": n in memory, "bytes": memory.get(n)} for n in names]
        return JSONResponse({"object": "list", "data": data})

    async def load_adapter(self, request: Request) -> Response:
        await self.engine.change(request.path_params["name"], True, partial(_left, request))
        return await self.adapters(request)

    async def unload_adapter(self, request: Request) -> Response:
        await self.engine.change(request.path_params["name"], False, partial(_left, request))
        return await self.adapters(request)

    async def chat_completions(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def _answer(self, request: Request, chat: bool) -> Response:
        body = await read_body(request, self.body_limit)
        wanted = await self.engine.prompts.run(lambda: parse_request(decode_json(body), chat, self.limits))
        async with AsyncExitStack() as held:
            held.enter_context(self.engine.place())
            name, ids, limit = await self.engine.prepare(wanted)
            await held.enter_async_context(self.engine.turn(partial(_left, request)))
            self.engine.resident(name)  # it may have been unloaded while this request waited
            shape = Shape(chat, name)
            if not wanted.stream:
                return await self._whole(request, wanted, ids, limit, shape)
            # The turn came before the answer begins, so that it can still be another status.
            return EventStream(self._events(wanted, ids, limit, shape), held.pop_all())

    async def _whole(
        self, request: Request, wanted: GenerationRequest, ids: list[int], limit: int, shape: Shape
    ) -> Response:
        usage, text, reason = Usage(), "", None
        records = self.engine.generate(wanted, shape.model, ids, limit, usage)
        try:
            async for record in records:
                if await request.is_disconnected():
                    return Response(status_code=CLIENT_CLOSED)
                text += record.text
                reason = record.finish_reason
        finally:
            await records.aclose()
        return JSONResponse({**shape.whole(text, reason), "usage": usage.to_dict(self.report_cached)})

    async def _events(
        self, wanted: GenerationRequest, ids: list[int], limit: int, shape: Shape
    ) -> AsyncIterator[str]:
        """Server-sent events of one generation. Whatever ends it early, the last event says so."""
        usage = Usage()
        records = self.engine.generate(wanted, shape.model, ids, limit, usage)
        try:
            if shape.chat:
                yield _event(shape.chunk("", None, role="assistant"))
            async for record in records:
                if record.text or record.finish_reason:
                    yield _event(shape.chunk(record.text, record.finish_reason))
            if wanted.stream_usage:
                counts = usage.to_dict(self.report_cached)
                yield _event({**shape.head(chunk=True), "choices": [], "usage": counts})
            yield "data: [DONE]\n\n"
        except RequestError as error:  # the answer has begun: its end says why it is cut short
            yield _event(error.to_dict())
        except Exception:
            log.exception("a stream of '%s' ended early", printable(shape.model))
            yield _event(INTERNAL.to_dict())
        finally:
            await records.aclose()


class EventStream(StreamingResponse):
    """Server-sent events that hold a place and the turn and give them back whatever ends them."""

    def __init__(self, events: AsyncIterator[str], held: AsyncExitStack) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._events, self._held = events, held

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Also when the client went away before the first event.
            await self._events.aclose()
            await self._held.aclose()


class Shape:
    """The form of an answer: chat or text completion, whole or in chunks."""

    def __init__(self, chat: bool, model: str) -> None:
        self.chat, self.model = chat, model
        self._id = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        self._created = int(time.time())

    def head(self, chunk: bool = False) -> dict:
        kind = "text_completion" if not self.chat else "chat.completion" + ".chunk" * chunk
        return {"id": self._id, "object": kind, "created": self._created, "model": self.model}

    def whole(self, text: str, reason: str | None) -> dict:
        content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return {**self.head(), "choices": [self._choice(content, reason)]}

    def chunk(self, text: str, reason: str | None, role: str | None = None) -> dict:
        delta = {"content": text} | ({"role": role} if role else {})
        content = {"delta": delta} if self.chat else {"text": text}
        return {**self.head(chunk=True), "choices": [self._choice(content, reason)]}

    def _choice(self, content: dict, reason: str | None) -> dict:
        return {"index": 0, "logprobs": None, "finish_reason": reason, **content}


def make_app(
    engine: Engine,
    body_limit: int,
    max_tokens: int,
    rules: AccessRules | None = None,
    report_cached: bool = False,
) -> Starlette:
    """The ASGI application. Closing it closes the engine.

    body_limit: bytes of a request body; max_tokens: the most a request may ask for; rules: None are those
    of a server for this machine alone; report_cached: tell what of a prompt was cached, and seconds.
    """
    rules = rules or AccessRules()
    service = Service(engine, body_limit, max_tokens, rules, report_cached)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        engine.close()

    app = Starlette(
        middleware=access_middleware(rules),
        routes=_routes(service),
        exception_handlers={
            RequestError: _refused,
            HTTPException: _no_such_route,
            ClientDisconnect: _gone,
            ClientGone: _gone,
            Exception: _defect,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # a redirect would repeat the Host header
    return app


def _routes(service: Service) -> list[Route]:
    return [
        Route("/health", service.health),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.model),
        Route("/v1/adapters", service.adapters),
        Route("/v1/adapters/{name}", service.load_adapter, methods=["POST"]),
        Route("/v1/adapters/{name}", service.unload_adapter, methods=["DELETE"]),
        Route("/v1/chat/completions", service.chat_completions, methods=["POST"]),
        Route("/v1/completions", service.completions, methods=["POST"]),
    ]


def _event(value: dict) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


async def _refused(request: Request, error: RequestError) -> Response:
    return error_answer(error)


async def _no_such_route(request: Request, error: HTTPException) -> Response:
    path = request.scope["path"]  # not request.url: a Host header may make that unreadable
    problem = RequestError(error.status_code, "invalid_request_error", f"{path}: {error.detail}")
    return error_answer(problem, error.headers)


async def _left(request: Request) -> None:
    """Returns when the client has closed its connection; the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _gone(request: Request, error: ClientDisconnect | ClientGone) -> Response:
    return Response(status_code=CLIENT_CLOSED)


async def _defect(request: Request, error: Exception) -> Response:
    return error_answer(INTERNAL)
