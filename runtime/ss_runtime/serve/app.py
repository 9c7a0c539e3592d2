"""The HTTP application: routes of the OpenAI API over an Engine."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ss_runtime.serve.engine import ClientGone, Engine, Usage
from ss_runtime.serve.requests import GenerationRequest, RequestError, bad_request, parse_request

CLIENT_CLOSED = 499  # nginx's code; nobody reads the answer
INTERNAL = RequestError(500, "server_error", "internal error; the server's log has the traceback")
log = logging.getLogger(__name__)


class Service:
    """The endpoints. body_limit: bytes of a request body; max_tokens: the most a request may ask for."""

    def __init__(self, engine: Engine, body_limit: int, max_tokens: int) -> None:
        self.engine, self.body_limit, self.max_tokens = engine, body_limit, max_tokens

    async def health(self, request: Request) -> Response:
        """Status, loaded adapters, memory in bytes, requests that run or wait."""
        bank = self.engine.bank
        memory = {
            "base": bank.base_bytes,
            "adapters": bank.memory(),
            "prompt_caches": bank.prompt_caches(),
            **bank.device_memory(),
        }
        return JSONResponse({"status": "ok", "memory": memory, "requests": self.engine.present})

    async def models(self, request: Request) -> Response:
        """The loaded adapters and the base alone, as models."""
        names = [*self.engine.bank.names, self.engine.bank.base_name]
        return JSONResponse({"object": "list", "data": [self._about(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """One of them."""
        name = request.path_params["name"]
        self.engine.resident(name)
        return JSONResponse(self._about(name))

    def _about(self, name: str) -> dict:
        return {"id": name, "object": "model", "created": self.engine.started, "owned_by": "ss-device"}

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
        vocab = self.engine.bundle.manifest.architecture.vocab_size
        wanted = parse_request(await self._body(request), chat, vocab, self.max_tokens)
        name, ids, limit = self.engine.prepare(wanted)
        shape = Shape(chat, name)
        if not wanted.stream:
            return await self._whole(request, wanted, ids, limit, shape)
        # A place is taken before the answer begins, so that a full queue can still say 429.
        place = self.engine.place(partial(_left, request))
        await place.__aenter__()
        try:
            self.engine.resident(name)  # it may have been unloaded while this request waited
        except RequestError:
            await place.__aexit__(None, None, None)
            raise
        return EventStream(self._events(wanted, ids, limit, shape), place)

    async def _body(self, request: Request) -> object:
        """The decoded JSON body, read no further than the limit."""
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.body_limit:
                raise RequestError(
                    413, "invalid_request_error", f"the body is larger than {self.body_limit} bytes"
                )
        try:
            value = json.loads(bytes(body), parse_constant=_refuse_constant)
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
        except (ValueError, RecursionError) as error:
            raise bad_request("the body is not valid JSON") from error
        return value

    async def _whole(
        self, request: Request, wanted: GenerationRequest, ids: list[int], limit: int, shape: Shape
    ) -> Response:
        usage, text, reason = Usage(), "", None
        async with self.engine.place(partial(_left, request)):
            records = self.engine.generate(wanted, shape.model, ids, limit, usage)
            try:
                async for record in records:
                    if await request.is_disconnected():
                        return Response(status_code=CLIENT_CLOSED)
                    text += record.text
                    reason = record.finish_reason
            finally:
                await records.aclose()
        return JSONResponse({**shape.whole(text, reason), "usage": usage.to_dict()})

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
                yield _event({**shape.head(chunk=True), "choices": [], "usage": usage.to_dict()})
            yield "data: [DONE]\n\n"
        except RequestError as error:  # the answer has begun: its end says why it is cut short
            yield _event(error.to_dict())
        except Exception:
            log.exception("a stream of '%s' ended early", shape.model)
            yield _event(INTERNAL.to_dict())
        finally:
            await records.aclose()


class EventStream(StreamingResponse):
    """Server-sent events that hold a place in the queue and give it back whatever ends them."""

    def __init__(self, events: AsyncIterator[str], place: AbstractAsyncContextManager) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._events, self._place = events, place

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Also when the client went away before the first event.
            await self._events.aclose()
            await self._place.__aexit__(None, None, None)


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


def make_app(engine: Engine, body_limit: int, max_tokens: int) -> Starlette:
    """The ASGI application. Closing it closes the engine."""
    service = Service(engine, body_limit, max_tokens)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        engine.close()

    return Starlette(
        routes=[
            Route("/health", service.health),
            Route("/v1/models", service.models),
            Route("/v1/models/{name:path}", service.model),
            Route("/v1/adapters", service.adapters),
            Route("/v1/adapters/{name}", service.load_adapter, methods=["POST"]),
            Route("/v1/adapters/{name}", service.unload_adapter, methods=["DELETE"]),
            Route("/v1/chat/completions", service.chat_completions, methods=["POST"]),
            Route("/v1/completions", service.completions, methods=["POST"]),
        ],
        exception_handlers={
            RequestError: _refused,
            HTTPException: _no_such_route,
            ClientDisconnect: _gone,
            ClientGone: _gone,
            Exception: _defect,
        },
        lifespan=lifespan,
    )


def _refuse_constant(name: str) -> None:
    """NaN and Infinity, which Python's reader takes for JSON."""
    raise ValueError(name)


def _event(value: dict) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


async def _refused(request: Request, error: RequestError) -> Response:
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return JSONResponse(error.to_dict(), error.status, headers)


async def _no_such_route(request: Request, error: HTTPException) -> Response:
    problem = RequestError(
        error.status_code, "invalid_request_error", f"{request.url.path}: {error.detail}"
    )
    return JSONResponse(problem.to_dict(), error.status_code)


async def _left(request: Request) -> None:
    """Returns when the client has closed its connection; the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _gone(request: Request, error: ClientDisconnect | ClientGone) -> Response:
    return Response(status_code=CLIENT_CLOSED)


async def _defect(request: Request, error: Exception) -> Response:
    return JSONResponse(INTERNAL.to_dict(), INTERNAL.status)
