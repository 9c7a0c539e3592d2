"""`ss-serve` under load: clients that ask, leave at random, change adapters and send nonsense."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx

from tests.families.tiny import VOCAB, make_base
from tests.runtime.bundles import make_bundle
from tests.soak.memory import MemoryTrace
from tests.soak.models import make_setting

CLIENTS, TIMEOUT = 4, 120
ALLOWED = {200, 400, 404, 413, 429}


@dataclass
class Served:
    """answers: request → its first whole answer; a later one that differs is one of the `problems`."""

    counts: Counter = field(default_factory=Counter)
    answers: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    memory: MemoryTrace = field(default_factory=MemoryTrace)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def problem(self, text: str) -> None:
        with self.lock:
            if len(self.problems) < 20:
                self.problems.append(text)


def soak_server(seed: int, minutes: float) -> Served:
    """Load for so long, then a look at what the server says of itself, then its end."""
    served = Served()
    with tempfile.TemporaryDirectory(prefix="soak-server-") as name:
        setting = make_setting(seed, 0)
        base = make_base("llama2", Path(name) / "base", seed=seed)
        make_bundle(Path(name) / "bundle", base, setting.configs, num_nodes=8)
        process, address = _start(Path(name) / "bundle")
        try:
            _load(
                served, address, process.pid, list(setting.configs), seed, time.monotonic() + 60 * minutes
            )
            _check_idle(served, address)
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(90)
            if code != 0:
                served.problem(f"the server ended with {code}")
    return served


def _start(bundle: Path) -> tuple[subprocess.Popen, str]:
    command = [sys.executable, "-c", "from ss_runtime.commands.serve import main; raise SystemExit(main())"]
    arguments = ["--bundle", str(bundle), "--port", "0", "--lookup", "--queue", "3", "--dtype", "float32"]
    process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if found := re.search(r"at (http://\S+)/v1", line):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, found[1]
    raise RuntimeError(f"the server did not start ({process.wait()})")


def _load(served: Served, address: str, process: int, names: list[str], seed: int, end: float) -> None:
    clients = [
        threading.Thread(target=_client, args=(served, address, names, Random(f"{seed} {i}"), end))
        for i in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    while any(client.is_alive() for client in clients):
        served.memory.sample(process)
        time.sleep(0.5)


def _client(served: Served, address: str, names: list[str], rng: Random, end: float) -> None:
    """Requests one after the other until the time is over."""
    with httpx.Client(base_url=address, timeout=TIMEOUT) as client:
        while time.monotonic() < end:
            way = rng.choices((_whole, _stream, _leave, _nonsense, _change), weights=(5, 4, 4, 2, 1))[0]
            try:
                way(served, client, names, rng)
                served.counts[way.__name__.strip("_")] += 1
            except Exception as error:
                served.problem(f"{way.__name__.strip('_')}: {error!r}")


def _body(names: list[str], rng: Random, **more) -> dict:
    """One of a few dozen requests, so that many are asked more than once."""
    body = {"model": rng.choice(names), "max_tokens": rng.choice((4, 12, 40))}
    start = rng.randrange(3, VOCAB - 40)
    body["prompt"] = [1, *([start + i for i in range(rng.choice((2, 5)))] * rng.choice((1, 3)))]
    body["prompt"][1:] = [3 + (token % 7) for token in body["prompt"][1:]]
    if rng.random() < 0.5:
        body |= {"temperature": 0.8, "top_p": 0.9, "seed": rng.randrange(3)}
    return body | more


def _same(served: Served, body: dict, text: str) -> None:
    key = json.dumps({k: v for k, v in body.items() if k != "stream"}, sort_keys=True)
    with served.lock:
        first = served.answers.setdefault(key, text)
    if first != text:
        served.problem(f"two answers to {key}: {first!r}, {text!r}")


def _checked(served: Served, status: int) -> bool:
    served.counts[f"status {status}"] += 1
    if status not in ALLOWED:
        served.problem(f"status {status}")
    return status == 200


def _whole(served: Served, client: httpx.Client, names: list[str], rng: Random) -> None:
    body = _body(names, rng)
    answer = client.post("/v1/completions", json=body)
    if _checked(served, answer.status_code):
        _same(served, body, answer.json()["choices"][0]["text"])
        served.counts["tokens"] += answer.json()["usage"]["completion_tokens"]


def _stream(served: Served, client: httpx.Client, names: list[str], rng: Random) -> None:
    body = _body(names, rng, stream=True)
    with client.stream("POST", "/v1/completions", json=body) as answer:
        if not _checked(served, answer.status_code):
            return
        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    if events[-1] != "[DONE]":
        if "is loaded" not in events[-1]:  # its adapter was unloaded while it waited
            served.problem(f"a stream ended with {events[-1]}")
        return
    _same(served, body, "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]))


def _leave(served: Served, client: httpx.Client, names: list[str], rng: Random) -> None:
    """Go away while waiting, before the first event or after some."""
    body = _body(names, rng, stream=rng.random() < 0.5)
    timeout = httpx.Timeout(TIMEOUT, read=rng.choice((0.001, 0.01, 0.05)))
    try:
        with client.stream("POST", "/v1/completions", json=body, timeout=timeout) as answer:
            for _, _ in zip(answer.iter_raw(), range(rng.randint(0, 3)), strict=False):
                pass
    except httpx.TimeoutException:
        served.counts["left while waiting"] += 1


def _nonsense(served: Served, client: httpx.Client, names: list[str], rng: Random) -> None:
    content = rng.choice(
        (b"", b"{", b"[]", b'{"prompt": 1}', b"[" * 100_000, b"\xff\xfe", b"x" * (2 << 20))
    )
    route = rng.choice(("/v1/completions", "/v1/chat/completions"))
    answer = client.post(route, content=content, headers={"Content-Type": "application/json"})
    if (
        answer.status_code == 200
        or not _checked(served, answer.status_code)
        and "error" not in answer.json()
    ):
        served.problem(f"{content[:20]!r} was answered: {answer.text[:100]}")


def _change(served: Served, client: httpx.Client, names: list[str], rng: Random) -> None:
    """An adapter is unloaded and loaded again."""
    name = rng.choice(names)
    _checked(served, client.delete(f"/v1/adapters/{name}").status_code)
    for _ in range(100):
        if _checked(served, client.post(f"/v1/adapters/{name}", json={}).status_code):
            return
        time.sleep(0.05)


def _check_idle(served: Served, address: str) -> None:
    """Once all clients are gone nobody holds a place."""
    for _ in range(100):
        health = httpx.get(f"{address}/health", timeout=TIMEOUT).json()
        if health["requests"] == 0:
            return
        time.sleep(0.2)
    served.problem(f"{health['requests']} requests are still there")
