"""`ss-serve` under load: 200 requests from 8 clients, adapters mixed, some of which leave.

    python -m scripts.serve_load BUNDLE --input 'DATA/{app}/test.jsonl.gz' --output runs/serve_load.json

Starts the server as a process of its own and talks to it with the `openai` client. Answers are held against
those of a model loaded for the adapter alone, one token per call. Every fifth request streams and leaves
after its first piece; 429 is answered by trying again. Counted: wrong answers, refusals, requests that
the server still holds afterwards, its resident size and MLX's bytes after every fifth of the requests, and
how it ends when SIGTERM meets a running stream.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai

from scripts.bundle_prompts import bundle_prompts
from ss_device.bundle import open_bundle
from ss_device.decoding import Drafter
from ss_runtime.backends import load_openblas
from ss_runtime.generation import generate
from ss_runtime.settings import RuntimeSettings
from ss_runtime.tokenization import load_tokenizer

CLIENTS, LEAVE_EVERY, TOKENS = 8, 5, 24


def expected_texts(bundle, prompts: dict[str, list[list[int]]]) -> dict[tuple[str, str, int], str]:
    """(adapter, application of the prompt, its number) → text of plain decoding."""
    from ss_runtime.mlx.loading import load_model

    tokenizer, found = load_tokenizer(bundle), {}
    stop = frozenset(bundle.manifest.architecture.eos_ids)
    for name, adapter in bundle.manifest.adapters.items():
        model = load_model(bundle, adapter, RuntimeSettings(dtype="float32"))
        for app, texts in prompts.items():
            for number, ids in enumerate(texts):
                result = generate(model, Drafter(1), ids, TOKENS, stop, adapter.stop_strings, tokenizer)
                found[name, app, number] = result.text
    return found


class Server:
    """`ss-serve` as a child process on a free port."""

    def __init__(self, bundle: Path) -> None:
        command = [
            "-c", "import sys; from ss_runtime.commands.serve import main; sys.exit(main())",
            "--bundle", str(bundle), "--dtype", "float32", "--port", "0", "--queue", "4", "--lookup",
            "--report-cached",
        ]  # fmt: skip
        self.process = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True)
        line = self.process.stderr.readline()
        self.address = line.split(" at ")[1].split("/v1")[0]

    def health(self) -> dict:
        return httpx.get(f"{self.address}/health", timeout=60).json()

    def resident_bytes(self) -> int:
        with open(f"/proc/{self.process.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096

    def end(self) -> dict:
        """SIGTERM; exit code, seconds and what it still wrote."""
        start = time.perf_counter()
        self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=60)
        seconds = time.perf_counter() - start
        return {"exit_code": self.process.returncode, "seconds": seconds, "stderr": errors.strip()}


class Load:
    """Requests of one run. `outcomes` counts: right, wrong, left, full (a refusal that was tried again)."""

    def __init__(self, server: Server, prompts: dict, wanted: dict) -> None:
        self.client = openai.OpenAI(
            base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=300
        )
        self.prompts, self.wanted = prompts, wanted
        self.keys, self.outcomes, self.lock = sorted(wanted), Counter(), threading.Lock()

    def request(self, number: int) -> None:
        """One request, again and again while the queue is full."""
        while True:
            try:
                outcome = self.leave(number) if number % LEAVE_EVERY == 4 else self.ask(number)
            except openai.RateLimitError:
                outcome = "full"
            with self.lock:
                self.outcomes[outcome] += 1
            if outcome != "full":
                return
            time.sleep(0.1)

    def ask(self, number: int) -> str:
        name, app, row = key = self.keys[7 * number % len(self.keys)]
        ask = {"model": name, "prompt": self.prompts[app][row], "max_tokens": TOKENS}
        if number % 2:
            text = "".join(e.choices[0].text for e in self.client.completions.create(**ask, stream=True))
        else:
            text = self.client.completions.create(**ask).choices[0].text
        return "right" if text == self.wanted[key] else "wrong"

    def leave(self, number: int) -> str:
        name, app, row = self.keys[7 * number % len(self.keys)]
        ask = {"model": name, "prompt": self.prompts[app][row], "max_tokens": 10 * TOKENS}
        with self.client.completions.create(**ask, stream=True) as events:
            next(iter(events), None)
        return "left"

    def run(self, first: int, count: int) -> None:
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(self.request, range(first, first + count)))


def wait_until_idle(server: Server, seconds: float = 30) -> int:
    """Requests that the server still holds after at most `seconds`."""
    deadline = time.time() + seconds
    while (held := server.health()["requests"]) and time.time() < deadline:
        time.sleep(0.1)
    return held


def end_while_it_streams(server: Server, load: Load) -> dict:
    """SIGTERM in the middle of an answer."""
    name, app, row = load.keys[0]
    ask = {"model": name, "prompt": load.prompts[app][row], "max_tokens": 10 * TOKENS, "stream": True}
    events = load.client.completions.create(**ask)
    next(iter(events))
    ended = server.end()
    events.close()
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--input", required=True, help="JSON lines, {app} in the path")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=4, help="per application")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    load_openblas()
    bundle = open_bundle(arguments.bundle)
    prompts = bundle_prompts(bundle, arguments.input, arguments.prompts)
    wanted = expected_texts(bundle, prompts)
    server = Server(arguments.bundle)
    try:
        load = Load(server, prompts, wanted)
        memory = [server.resident_bytes()]
        health = [server.health()]
        part = arguments.requests // 5
        for first in range(0, arguments.requests, part):
            load.run(first, min(part, arguments.requests - first))
            held = wait_until_idle(server)
            memory.append(server.resident_bytes())
            health.append(server.health())
        result = {
            "requests": arguments.requests,
            "clients": CLIENTS,
            "outcomes": dict(load.outcomes),
            "held_afterwards": held,
            "resident_bytes": memory,
            "health": [health[0], health[-1]],
            "shutdown_during_a_stream": end_while_it_streams(server, load),
        }
    finally:
        if server.process.poll() is None:
            os.kill(server.process.pid, signal.SIGKILL)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
