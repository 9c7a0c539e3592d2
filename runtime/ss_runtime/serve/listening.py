"""The socket of a server, and the uvicorn server around it."""

from __future__ import annotations

import socket
from functools import partial

from ss_device.errors import UserError

# Connections that the system holds for us, and that asyncio accepts in one go: each takes 0.1 ms.
BACKLOG = 128


def resolve(host: str, port: int) -> tuple[int, str]:
    """Address family and address that a host stands for: IPv4 where it has such an address.

    Raises UserError for an unknown host.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, port, error) from error
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, address[0]


def listen(host: str, port: int, family: int, address: str) -> socket.socket:
    """A bound socket; `host` is for the message. Raises UserError when it is not available."""
    try:
        return socket.create_server((address, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: Exception) -> UserError:
    return UserError(f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}")


def place(listener: socket.socket) -> str:
    """Host and port of a bound socket, as a URL has them."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def make_server(app, limits, verbose: bool, shutdown_seconds: int, on_signal):
    """A uvicorn server with guarded connections. on_signal: called in the signal handler."""
    import uvicorn

    from ss_runtime.serve.connection import GuardedProtocol

    class Server(uvicorn.Server):
        def handle_exit(self, sig, frame) -> None:
            on_signal()
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        app,
        http=partial(GuardedProtocol, limits=limits),
        ws="none",
        proxy_headers=False,  # a client could put what it likes into the log as its address
        backlog=BACKLOG,
        log_level="info" if verbose else "error",  # its warnings are what clients do wrong
        timeout_graceful_shutdown=shutdown_seconds,
        server_header=False,
    )
    return Server(config)
