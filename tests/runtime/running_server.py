"""An application served in a thread, for tests that talk HTTP to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import uvicorn
from starlette.applications import Starlette


@contextmanager
def served(app: Starlette) -> Iterator[str]:
    """The address, `http://…`, until the block ends."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive()


def requests_held(address: str, wanted: int) -> int:
    """Requests that run or wait, once they are as many as wanted or ten seconds have passed."""
    deadline = time.time() + 10
    while (found := httpx.get(f"{address}/health").json()["requests"]) != wanted and time.time() < deadline:
        time.sleep(0.02)
    return found
