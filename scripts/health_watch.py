"""Polls a server's /health from a process of its own and keeps how long every answer took."""

from __future__ import annotations

import multiprocessing
import socket
import time

PAUSE, TIMEOUT = 0.02, 60.0  # seconds


class HealthWatch:
    """A running watcher; `end` gives its figures in milliseconds.

    `late` is by how much the worst of the watcher's own pauses was too long: what other programs on the
    machine did to it, and as much may have happened to the server.
    """

    def __init__(self, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._stop, (self._results, results) = context.Event(), context.Pipe(duplex=False)
        self._process = context.Process(target=_watch, args=(port, self._stop, results))
        self._process.start()

    def end(self) -> dict:
        """Stop watching. Counts, quantiles in milliseconds."""
        self._stop.set()
        times, failed, late = self._results.recv()
        self._process.join()
        ordered = sorted(times)
        at = {q: 1000 * ordered[int(q * (len(ordered) - 1))] for q in (0.5, 0.99, 0.999, 1.0)}
        return {
            "polls": len(times),
            "failed": failed,
            "median_ms": round(at[0.5], 1),
            "p99_ms": round(at[0.99], 1),
            "p999_ms": round(at[0.999], 1),
            "max_ms": round(at[1.0], 1),
            "over_100_ms": sum(t > 0.1 for t in times),
            "late_ms": round(1000 * late, 1),
        }


def _watch(port: int, stop, results) -> None:
    request = f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode()
    times, failed, late = [0.0], 0, 0.0
    while not stop.is_set():
        start = time.perf_counter()
        failed += not _healthy(port, request)
        asleep = time.perf_counter()
        times.append(asleep - start)
        time.sleep(PAUSE)
        late = max(late, time.perf_counter() - asleep - PAUSE)
    results.send((times, failed, late))


def _healthy(port: int, request: bytes) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT) as sock:
            sock.sendall(request)
            found = b""
            while part := sock.recv(65536):
                found += part
        return found.startswith(b"HTTP/1.1 200")
    except OSError:
        return False
