"""Polls a server's /health from a process of its own and keeps how long every answer took."""

from __future__ import annotations

import multiprocessing
import socket
import time

PAUSE, TIMEOUT = 0.02, 60.0  # seconds


class HealthWatch:
    """A running watcher; `end` gives its figures in milliseconds.

    Other programs on the machine delay answers too. Every poll is therefore followed by one of a process
    that does nothing but answer (`control`): what it takes longer than a millisecond is the machine's.
    """

    def __init__(self, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._stop, (self._results, results) = context.Event(), context.Pipe(duplex=False)
        listener = socket.create_server(("127.0.0.1", 0))
        ports = (port, listener.getsockname()[1])
        self._control = context.Process(target=_answer_at_once, args=(listener,), daemon=True)
        self._process = context.Process(target=_watch, args=(ports, self._stop, results), daemon=True)
        self._control.start(), self._process.start()
        listener.close()

    def end(self) -> dict:
        """Stop watching. Counts, quantiles in milliseconds."""
        self._stop.set()
        times, control, failed = self._results.recv()
        self._process.join()
        self._control.terminate()
        return {"polls": len(times), "failed": failed, **_figures(times), "control": _figures(control)}


def _figures(seconds: list[float]) -> dict:
    ordered = sorted(seconds)
    named = {"median_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999, "max_ms": 1.0}
    found = {name: round(1000 * ordered[int(q * (len(ordered) - 1))], 1) for name, q in named.items()}
    return {**found, "over_100_ms": sum(t > 0.1 for t in seconds)}


def _watch(ports: tuple[int, int], stop, results) -> None:
    times, failed = ([], []), 0
    while not stop.is_set() or not times[0]:
        for port, found in zip(ports, times, strict=True):
            start = time.perf_counter()
            failed += not _healthy(port)
            found.append(time.perf_counter() - start)
        time.sleep(PAUSE)
    results.send((*times, failed))


def _healthy(port: int) -> bool:
    request = f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT) as sock:
            sock.sendall(request)
            found = b""
            while part := sock.recv(65536):
                found += part
        return found.startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def _answer_at_once(listener: socket.socket) -> None:
    while True:
        with listener.accept()[0] as sock:
            sock.recv(1000)
            sock.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
