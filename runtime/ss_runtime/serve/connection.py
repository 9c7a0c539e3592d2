"""Connections with deadlines and a limit, over uvicorn's protocol, so that no client can hold one idle."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ss_runtime.serve.requests import RequestError
from ss_runtime.serve.settings import ConnectionSettings

# Bytes of an answer that may wait for a slow client, so that it does not hold the turn to generate: a
# stream of 4096 tokens takes less.
UNSENT = 1 << 20


class SizedRequests(h11.Connection):
    """Reads requests whose body has a stated length; `problem` is what was wrong with the last one.

    A chunked body is refused: pieces of one byte each would keep the event loop busy for a second
    per 256 KiB, and no client of a JSON interface needs them.
    """

    problem = RequestError(400, "invalid_request_error", "invalid HTTP request")

    def next_event(self):
        try:
            event = super().next_event()
            if isinstance(event, h11.Request) and any(n == b"transfer-encoding" for n, _ in event.headers):
                raise h11.RemoteProtocolError("a body needs a Content-Length", error_status_hint=411)
        except h11.RemoteProtocolError as error:
            message = f"invalid HTTP request: {error}"
            hint = error.error_status_hint  # 501 for codings that h11 does not know: no failure of ours
            self.problem = RequestError(hint if hint < 500 else 411, "invalid_request_error", message)
            raise
        return event


class GuardedProtocol(H11Protocol):
    """One connection. Refusals that the application never sees have its JSON form as well."""

    def __init__(self, *arguments, limits: ConnectionSettings, **settings) -> None:
        super().__init__(*arguments, **settings)
        self.conn = SizedRequests(h11.SERVER)
        self._limits = limits
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._unsent_since: float | None = None
        self.waiting_since: float | None = None  # the client has the word; None while the server has it

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=UNSENT)
        self._watch_reading()
        self._watch_writing()
        if sum(not c.transport.is_closing() for c in self.connections) > self._limits.connections:
            self._make_room()

    def _make_room(self) -> None:
        """Close what has waited longest for its client; this connection where the others wait for us."""
        others = [
            c
            for c in self.connections
            if c is not self and c.waiting_since is not None and not c.transport.is_closing()
        ]
        if others:
            min(others, key=lambda c: c.waiting_since).transport.abort()
        else:
            self._refuse(RequestError(503, "server_error", "too many connections: try again later"))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and not self._half_read():  # uvicorn's own timer runs
            self._stop_reading_timer()
            self.waiting_since = self.loop.time()
        else:  # the next request came behind this one, or a body is still coming that nobody wants
            self._watch_reading()

    def _half_read(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY or (
            self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        )

    def _watch_reading(self) -> None:
        """A deadline while a request is incomplete. Bytes that come one by one do not move it."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY) or self.transport.is_closing():
            self._stop_reading_timer()
            self.waiting_since = None
        elif self._read_timer is None:
            self.waiting_since = self.loop.time()
            self._read_timer = self.loop.call_later(self._limits.read_timeout, self._read_too_long)

    def _stop_reading_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _read_too_long(self) -> None:
        self._read_timer = None
        if self._half_read():
            message = f"the request was not complete after {self._limits.read_timeout:g} s"
            self._refuse(RequestError(408, "invalid_request_error", message))
        else:
            self.transport.close()

    def _watch_writing(self) -> None:
        """Cut a client off that has left something unsent for too long; looks four times in that time."""
        if self.transport.get_write_buffer_size() == 0:
            self._unsent_since = None
        elif self._unsent_since is None:
            self._unsent_since = self.loop.time()
        elif self.loop.time() - self._unsent_since >= self._limits.write_timeout:
            self.transport.abort()
            return
        self._write_timer = self.loop.call_later(self._limits.write_timeout / 4, self._watch_writing)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(self.conn.problem)

    def shutdown(self) -> None:
        """Called once, when the server ends. A request that is still arriving is not waited for."""
        if self.transport.is_closing():
            return
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and self.conn.their_state is h11.SEND_BODY:
            self._refuse(RequestError(503, "server_error", "the server is shutting down"))
        else:
            super().shutdown()

    def _refuse(self, error: RequestError) -> None:
        """Answer, unless an answer has begun, and close. The application learns that the client is gone."""
        running = self.cycle is not None and not self.cycle.response_complete
        if not (running and self.cycle.response_started):
            self.transport.write(_raw_answer(error))
        if running:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


def _raw_answer(error: RequestError) -> bytes:
    """A whole HTTP answer; h11's own state may not allow it any more."""
    body = json.dumps(error.to_dict(), ensure_ascii=False).encode()
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
