"""`ss-serve` against thousands of hostile requests, with honest ones among them.

    python -m scripts.hostile_requests BUNDLE --requests 5000 --seed 1

Starts the server as a process of its own, records greedy answers, and then sends cases of
`scripts/hostile_cases.py`: malformed HTTP, other hosts and origins, half-open connections, trickled bodies,
clients that leave, floods, huge and mutated JSON. Honest requests must get the recorded answers. /health is
polled all the while. In the end SIGTERM meets a stream and an unfinished body. Exit code 1 when an answer
was wrong, missing or a 5xx other than 503, when a traceback was logged, or when the server ended otherwise
than with code 0. `--case INDEX` sends one case of a seed again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.health_watch import HealthWatch
from scripts.hostile_cases import Target, answer, is_failure, post, run_case, text_of
from ss_device.bundle import open_bundle
from ss_device.command_line import CommandParser, positive, run_command

PROMPTS = [
    f"{start} {end}" for start in ("SELECT", "name: Blue Spice,", "#Person1#: Hello,") for end in "abcd"
]
SETTLE = 13.0  # seconds after which the server has closed what it does not wait for


class Server:
    """`ss-serve` as a child process on a free port, its stderr in a file."""

    def __init__(self, bundle: Path, options: list[str]) -> None:
        code = "import sys; from ss_runtime.commands.serve import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "--bundle", str(bundle), "--port", "0", *options]
        self.log = tempfile.NamedTemporaryFile(prefix="ss-serve-", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(command, stderr=self.log)
        while " at http" not in self.stderr():
            if self.process.poll() is not None:
                raise SystemExit(f"ss-serve ended at once: {self.stderr()}")
            time.sleep(0.05)
        self.port = int(self.stderr().split(" at http://")[1].split("/v1")[0].rpartition(":")[2])

    def stderr(self) -> str:
        return Path(self.log.name).read_text(errors="replace")

    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * 4096

    def sockets(self) -> int:
        """Open sockets of the process."""
        folder, found = f"/proc/{self.process.pid}/fd", 0
        for name in os.listdir(folder):
            try:
                found += os.readlink(f"{folder}/{name}").startswith("socket:")
            except OSError:
                continue
        return found

    def end(self, target: Target) -> dict:
        """SIGTERM while one client gets a stream and another one has sent half a body."""
        stream, half = target.connect(), target.connect()
        stream.sendall(post(target, target.valid(max_tokens=300, stream=True)))
        half.sendall(post(target, target.valid())[:-5])
        stream.recv(100)
        start = time.perf_counter()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(100)
        except subprocess.TimeoutExpired:
            code = "killed after 100 s"
            self.process.kill()
        stream.close(), half.close()
        return {"exit_code": code, "seconds": round(time.perf_counter() - start, 1)}


class Campaign:
    """Counts of one run. failures: (index, kind, outcome)."""

    def __init__(self, server: Server, seed: int, models: list[str]) -> None:
        self.server, self.seed = server, seed
        self.target = Target(server.port, models[0], models[1] if len(models) > 1 else None)
        self.counts: dict[str, Counter] = {}
        self.failures: list[tuple[int, str, str]] = []
        self.lock = threading.Lock()

    def record(self) -> None:
        """The answers that honest requests must get, one request at a time."""
        for prompt in PROMPTS:
            self.target.wanted[prompt] = self.ask(prompt)

    def ask(self, prompt: str) -> str:
        with self.target.connect() as sock:
            sock.sendall(post(self.target, self.target.valid(prompt, max_tokens=16)))
            return text_of(answer(sock)[1])

    def case(self, index: int) -> None:
        """One case."""
        kind, outcomes = run_case(self.seed, index, self.target)
        with self.lock:
            self.counts.setdefault(kind, Counter()).update(outcomes)
            self.failures += [(index, kind, found) for found in outcomes if is_failure(kind, found)]

    def run(self, indices: range, clients: int) -> dict:
        """Send the cases and count what came of them."""
        sockets, memory = self.server.sockets(), self.server.resident_bytes()
        watch, start = HealthWatch(self.server.port), time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            for _ in pool.map(self.case, indices):
                pass
        seconds, health = time.perf_counter() - start, watch.end()
        time.sleep(SETTLE)
        left_open = max(self.server.sockets() - sockets, 0)
        changed = sum(self.ask(prompt) != text for prompt, text in self.target.wanted.items())
        return {
            "cases": len(indices),
            "seconds": round(seconds, 1),
            "answers": {kind: dict(found) for kind, found in sorted(self.counts.items())},
            "wrong_afterwards": changed,
            "health": health,
            "resident_bytes": [memory, self.server.resident_bytes()],
            "held_by_clients": len(self.target.held),
            "connections_left_open": left_open,
        }


def problems(result: dict) -> list[str]:
    """What must not be."""
    found = [f"case {index}, {kind}: {outcome}" for index, kind, outcome in result["failures"]]
    found += [f"{result['tracebacks']} tracebacks were logged"] if result["tracebacks"] else []
    found += [f"{result['wrong_afterwards']} answers changed"] if result["wrong_afterwards"] else []
    found += [f"{n} connections stayed open"] if (n := result["connections_left_open"]) > 0 else []
    return found + (["the server did not end with code 0"] if result["ended"]["exit_code"] != 0 else [])


def show(result: dict) -> None:
    """The result for people."""
    for kind, found in result["answers"].items():
        print(f"{kind:20}", "  ".join(f"{name}: {count}" for name, count in sorted(found.items())))
    memory = " → ".join(f"{size / 1e6:.1f} MB" for size in result["resident_bytes"])
    open_ = f"{result['connections_left_open']} of {result['held_by_clients']} held"
    health = dict(result["health"])
    control = health.pop("control")
    for name, figures in (("/health", health), ("  idle control", control)):
        print(f"{name:20}", "  ".join(f"{key}: {value}" for key, value in figures.items()))
    print(f"{'server':20} {memory}, connections left open: {open_}, tracebacks: {result['tracebacks']}")
    print(f"{'SIGTERM':20} code {result['ended']['exit_code']} after {result['ended']['seconds']} s")
    for problem in problems(result)[:40]:
        print("problem:", problem)


def run(arguments: argparse.Namespace) -> int:
    bundle = open_bundle(arguments.bundle)
    server = Server(arguments.bundle, arguments.server_option)
    try:
        campaign = Campaign(server, arguments.seed, sorted(bundle.manifest.adapters, reverse=True))
        campaign.record()
        one = arguments.case
        indices = range(arguments.requests) if one is None else range(one, one + 1)
        result = {"seed": arguments.seed, **campaign.run(indices, arguments.clients)}
        result["ended"] = server.end(campaign.target)
        result |= {"failures": sorted(campaign.failures), "tracebacks": server.stderr().count("Traceback")}
        result |= {"stderr_lines": server.stderr().count("\n"), "stderr_tail": server.stderr()[-2000:]}
    finally:
        if server.process.poll() is None:
            server.process.kill()
    print(json.dumps(result, indent=1)) if arguments.json else show(result)
    return 1 if problems(result) else 0


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = CommandParser(
        prog="python -m scripts.hostile_requests",
        description="Send hostile and honest requests to a server of its own and count what comes of them.",
        example="python -m scripts.hostile_requests build/sqlctx --requests 5000 --seed 1",
    )
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="bundle folder with MLX weights")
    add("--requests", type=positive, default=1000, metavar="N", help="cases to send (default: 1000)")
    add("--seed", type=int, default=0, help="what the cases are made from (default: 0)")
    add("--case", type=int, metavar="INDEX", help="send this case of the seed alone")
    add("--clients", type=positive, default=8, metavar="N", help="cases at a time (default: 8)")
    add("--server-option", action="append", default=[], metavar="WORD", help="passed on to ss-serve")
    add("--json", action="store_true", help="print one JSON object")
    return run_command(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
