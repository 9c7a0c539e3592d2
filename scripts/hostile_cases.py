"""Requests that no server wants: every case is made from a seed and its index, and sent by raw socket.

A kind is a function (rng, target) → outcomes: the status of every answer as text, or `closed` (without an
answer), `silent` (no answer in time), `left` (we went first), `held` (left open until the run ends).
"""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse

PATIENCE = 60.0  # seconds for an answer


@dataclass
class Target:
    """A server. model: an adapter that stays; spare: one that may be unloaded; held: sockets left open."""

    port: int
    model: str
    spare: str | None
    wanted: dict[str, str] = field(default_factory=dict)
    held: list[socket.socket] = field(default_factory=list)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def valid(self, prompt: str = "SELECT", **fields) -> dict:
        return {"model": self.model, "prompt": prompt, "max_tokens": 4, **fields}


def http_request(target: Target, method: str, path: str, body: bytes | None = None, **headers) -> bytes:
    """Bytes of a request. headers: names with _ for -; None leaves a default one out."""
    fields = {"Host": target.host, "Content-Type": "application/json"}
    if body is not None:
        fields["Content-Length"] = len(body)
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{n}: {v}" for n, v in fields.items() if v is not None)]
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape") + (body or b"")


def post(target: Target, value: object, path: str = "/v1/completions", **headers) -> bytes:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return http_request(target, "POST", path, body, **headers)


def outcome(sock: socket.socket, seconds: float = PATIENCE) -> str:
    """What comes back on a connection."""
    return answer(sock, seconds)[0]


def answer(sock: socket.socket, seconds: float = PATIENCE) -> tuple[str, bytes]:
    """Outcome and body of one answer."""
    sock.settimeout(seconds)
    response = HTTPResponse(sock)
    try:
        response.begin()
        return str(response.status), response.read()
    except TimeoutError:
        return ("silent" if seconds == PATIENCE else "left"), b""
    except (HTTPException, OSError, ValueError):
        return "closed", b""


def send(target: Target, data: bytes, seconds: float = PATIENCE) -> list[str]:
    """One request on a connection of its own."""
    with target.connect() as sock:
        with suppress(OSError):  # refused before it was read
            sock.sendall(data)
        return [outcome(sock, seconds)]


def reset(sock: socket.socket) -> None:
    """Close without a farewell."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


# Malformed HTTP.

HEADS = (
    b"\0" * 60 + b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET /\x80\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + b"k" * 80,
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"\r\n" * 3000,
    b"GET / HTTP/1.0\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5, 6\r\n\r\nhello!",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 400 + b"\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 70_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\nHost: x\n\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n folded\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
    b"GET http://[ HTTP/1.1\r\nHost: [\r\n\r\n",
    b"\x1b[31m / HTTP/1.1\r\nHost: x\r\n\r\n",
)


def malformed(rng: random.Random, target: Target) -> list[str]:
    head = rng.choice(HEADS)
    if rng.random() < 0.3:
        head = rng.randbytes(rng.randrange(1, 3000)) + b"\r\n\r\n"
    elif rng.random() < 0.4:  # a valid one with a few bytes changed
        changed = bytearray(post(target, target.valid()))
        for _ in range(rng.randrange(1, 6)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        head = bytes(changed)
    elif rng.random() < 0.3:  # behind a good request on the same connection
        head = http_request(target, "GET", "/health") + head
    return send(target, head, 1.0)


def upgrade(rng: random.Random, target: Target) -> list[str]:
    headers = {"Connection": "Upgrade", "Upgrade": rng.choice(["websocket", "h2c", "\x01"])}
    headers |= {"Sec_WebSocket_Key": "x", "Sec_WebSocket_Version": "13"}
    return send(target, http_request(target, "GET", rng.choice(["/health", "/v1/models", "/x"]), **headers))


def chunked(rng: random.Random, target: Target) -> list[str]:
    body = json.dumps(target.valid(pad="x" * rng.choice([10, 1000, 100_000]))).encode()
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + rng.choice([b"0\r\n\r\n", b"-1\r\n", b"g"])
    head = http_request(target, "POST", "/v1/completions", Transfer_Encoding="chunked")
    return send(target, head + pieces, 5.0)


def pipelined(rng: random.Random, target: Target) -> list[str]:
    one = http_request(target, "GET", rng.choice(["/health", "/v1/models", "/nothing"]))
    with target.connect() as sock:
        sock.sendall(one * rng.randrange(2, 100) + rng.choice([b"", b"\0\0\r\n\r\n", b"GET /"]))
        return [outcome(sock)]


# Pages of other sites, and what they can send.

ROUTES = (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/health"), ("OPTIONS", "/v1/models"))
EVIL = (
    "evil.example",
    "evil.example:8080",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "",
    "[",
    "[::1",
    "0.0.0.0",
    "2130706433",
    "127.0.0.1:x",
    "user@127.0.0.1",
    "local\x1b[31mhost",
    "a" * 5000,
)


def wrong_host(rng: random.Random, target: Target) -> list[str]:
    method, path = rng.choice(ROUTES)
    body = json.dumps(target.valid()).encode() if method == "POST" else None
    return send(target, http_request(target, method, path, body, Host=rng.choice(EVIL)))


def wrong_origin(rng: random.Random, target: Target) -> list[str]:
    method, path = rng.choice(ROUTES)
    body = json.dumps(target.valid()).encode() if method == "POST" else None
    origins = (
        "https://evil.example",
        "null",
        f"http://{target.host}.evil.example",
        "http://localhost",
        "*",
    )
    headers = {"Origin": rng.choice(origins), "Access_Control_Request_Method": rng.choice([None, "POST"])}
    return send(target, http_request(target, method, path, body, **headers))


def wrong_type(rng: random.Random, target: Target) -> list[str]:
    types = (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        None,
        "",
        "text/plain; application/json",
        "application/jsonx",
        "\xff",
    )
    path = rng.choice(["/v1/completions", f"/v1/adapters/{target.spare or target.model}"])
    return send(target, post(target, target.valid(), path, Content_Type=rng.choice(types)))


# Clients that are slow, go, or never say what they want.


def half_open(rng: random.Random, target: Target) -> list[str]:
    sock = target.connect()
    data = post(target, target.valid())
    with suppress(OSError):
        sock.sendall(data[: rng.choice([0, 0, 5, 40, len(data) - 1])])
    target.held.append(sock)
    return ["held"]


def trickle(rng: random.Random, target: Target) -> list[str]:
    """A byte at a time, of the head or the body; some go on until the server has had enough."""
    data = post(target, target.valid(pad="x" * 300))
    start = rng.choice([0, len(data) - 300])
    end = time.monotonic() + (20 if rng.random() < 0.02 else rng.uniform(0.1, 0.6))
    with target.connect() as sock:
        try:
            sock.sendall(data[:start])
            for byte in data[start:-1]:
                if time.monotonic() > end:
                    return ["left"]
                sock.sendall(bytes([byte]))
                time.sleep(0.08)
        except OSError:
            pass
        return [outcome(sock, 12.0)]


def unfinished(rng: random.Random, target: Target) -> list[str]:
    data = post(target, target.valid(pad="x" * 2000))
    sock = target.connect()
    sock.sendall(data[: rng.randrange(1, len(data))])
    time.sleep(rng.choice([0, 0, 0.05]))
    reset(sock) if rng.random() < 0.5 else sock.close()
    return ["left"]


def leaver(rng: random.Random, target: Target) -> list[str]:
    """Goes before its answer, at its first bytes, or in the middle."""
    ask = target.valid(rng.choice(["SELECT", "name, country"]), max_tokens=200, stream=rng.random() < 0.7)
    sock = target.connect()
    sock.sendall(post(target, ask))
    sock.settimeout(2.0)
    with suppress(OSError):
        for _ in range(rng.choice([0, 0, 1, 5])):
            sock.recv(300)
    time.sleep(rng.choice([0, 0.02, 0.2]))
    reset(sock) if rng.random() < 0.5 else sock.close()
    return ["left"]


def deaf(rng: random.Random, target: Target) -> list[str]:
    """Asks for answers and never reads them."""
    sock = target.connect()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.settimeout(1.0)
    with suppress(OSError):
        if rng.random() < 0.5:
            sock.sendall(post(target, target.valid(max_tokens=300, stream=True)))
        else:
            sock.sendall(http_request(target, "GET", "/v1/adapters") * 2000)
    target.held.append(sock)
    return ["held"]


def flood(rng: random.Random, target: Target) -> list[str]:
    """Many connections at once."""
    data = rng.choice([post(target, target.valid(max_tokens=2)), http_request(target, "GET", "/v1/models")])
    with ThreadPoolExecutor(20) as pool:
        return [found for part in pool.map(lambda _: send(target, data), range(20)) for found in part]


# Bodies.


def oversize(rng: random.Random, target: Target) -> list[str]:
    size = rng.choice([(1 << 20) + 1, 3 << 20, 10**12, 10**18])
    head = http_request(target, "POST", "/v1/completions", Content_Length=size)
    return send(target, head + b"x" * min(size, 3 << 20))


def heavy_json(rng: random.Random, target: Target) -> list[str]:
    size = rng.choice([1000, 100_000, 1_000_000])
    bodies = (
        lambda: b"[" * size,
        lambda: b"[" * 900 + b"]" * 900,
        lambda: b'{"a":' * (size // 5),
        lambda: b'{"prompt":[' + b"[]," * (size // 3 - 20) + b"[]]}",
        lambda: b"1" * size,
        lambda: b'{"model":[' + b"{}," * (size // 3 - 20) + b"{}]}",
        lambda: b'"' + b"\\u0041" * (size // 6) + b'"',
        lambda: b"{" + b",".join(b'"%d":0' % i for i in range(size // 12)) + b"}",
        lambda: b'{"prompt":"a","max_tokens":' + b"9" * (size - 60) + b"}",
        lambda: b'{"prompt":"a","temperature":1e' + b"9" * 9 + b"}",
        lambda: b"[1.5e3" + b",1.5e3" * (size // 7) + b"]",
        lambda: rng.randbytes(size),
        lambda: b'{"prompt": NaN}',
        lambda: b"",
    )
    return send(target, post(target, rng.choice(bodies)(), rng.choice(PATHS)))


def unicode(rng: random.Random, target: Target) -> list[str]:
    texts = (
        "\x1b[31mred\x1b[0m",
        "\u202egnp",
        "a\0b",
        "\r\nX: y",
        "\ud800",
        "\udfff\ud800",
        "\ufffe",
        "🏴" * 300,
        "́" * 999,
    )
    text = rng.choice(texts)
    choice = rng.randrange(4)
    if choice == 0:
        path = "".join(
            rng.choice(["%1b", "%00", "%0d%0a", "%ff", "%ed%a0%80", "/", "..", "%2e"]) for _ in range(5)
        )
        return send(
            target, http_request(target, rng.choice(["GET", "DELETE", "PUT"]), f"/v1/adapters/{path}")
        )
    if choice == 1:
        data = json.dumps(target.valid("@")).encode().replace(b"@", rng.randbytes(8).replace(b'"', b"\xff"))
        return send(target, post(target, data))
    field_name = rng.choice(["model", "prompt", "stop", "user"])
    return send(target, post(target, target.valid("x") | {field_name: text}))


def huge_prompt(rng: random.Random, target: Target) -> list[str]:
    texts = (
        "a" * 1_000_000,
        "the cat " * 120_000,
        " " * 1_000_000,
        "é" * 80_000,
        "1" * 30_000,
        "🏴" * 40_000,
        [5] * 300_000,
        [[5] * 200_000],
        [5] * 2000,
        "SELECT " * 2000,
    )
    prompt = rng.choice(texts)
    if rng.random() < 0.3 and isinstance(prompt, str):
        roles = rng.choice([1, 5000])
        share = {"role": "user", "content": prompt[: len(prompt) // roles]}
        body = {"model": target.model, "messages": [share] * roles, "max_tokens": 2}
        return send(target, post(target, json.dumps(body, ensure_ascii=False).encode(), PATHS[1]))
    body = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": 2,
        "stop": rng.choice([None, "x" * 90_000]),
    }
    return send(target, post(target, json.dumps(body, ensure_ascii=False).encode()))


PATHS = ("/v1/completions", "/v1/chat/completions")
FIELDS = [
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "n",
    "best_of",
    "logprobs",
    "echo",
    "suffix",
    "logit_bias",
    "tools",
    "response_format",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "lossy_typical",
    "user",
    "metadata",
    "__proto__",
]
VALUES = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    2**31,
    2**63,
    -(2**64),
    10**400,
    1e308,
    -1e308,
    5e-324,
    0.5,
    "",
    "a",
    "1",
    [],
    {},
    [[]],
    [None],
    [{}],
    {"a": {"b": [1]}},
    [1, 2, 3],
    [10**9],
    [-1],
    [True],
    ["a", "b"],
    "x" * 5000,
    [["a"]],
    {"include_usage": "yes"},
    [{"role": 1}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "\x1b[2J", "content": "x"}],
    [{"role": "user", "content": {"text": "x"}}],
    {"type": "json_object"},
)


def mutated(rng: random.Random, target: Target) -> list[str]:
    """A valid request with a few fields of other types and sizes."""
    path = rng.choice(PATHS)
    body = target.valid(temperature=rng.choice([0, 1.0]), stream=rng.random() < 0.3)
    if path == PATHS[1]:
        body["messages"] = [{"role": "user", "content": "SELECT"}]
    for _ in range(rng.randrange(1, 4)):
        body[rng.choice(FIELDS)] = rng.choice(VALUES)
    if rng.random() < 0.1:
        del body[rng.choice(list(body))]
    return send(target, post(target, body if rng.random() < 0.95 else rng.choice(VALUES), path))


def adapters(rng: random.Random, target: Target) -> list[str]:
    """Loading and unloading while others generate; unknown names."""
    name = rng.choice([target.spare or "none", "none", "x" * 3000, "..%2f..%2fetc", "%1b%5b31m", ""])
    return send(target, http_request(target, rng.choice(["POST", "DELETE"]), f"/v1/adapters/{name}", b""))


def lost(rng: random.Random, target: Target) -> list[str]:
    """Wrong routes and methods."""
    methods = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "PATCH", "BREW", "get")
    paths = (
        "/",
        "/health/",
        "//health",
        "/v1",
        "/v1/models/../x",
        "/v1/completions?x=%00",
        "/%2e%2e/etc/passwd",
        "*",
        "http://evil.example/health",
        "/v1/models/" + "m" * 8000,
        "/health#x",
    )
    return send(target, http_request(target, rng.choice(methods), rng.choice(paths)))


def honest(rng: random.Random, target: Target) -> list[str]:
    """A greedy request, tried again while the server says that it is busy."""
    prompt = rng.choice(sorted(target.wanted))
    for _ in range(1000):
        with target.connect() as sock:
            try:
                sock.sendall(post(target, target.valid(prompt, max_tokens=16)))
            except OSError:
                continue
            status, body = answer(sock)
        if status == "200":
            return ["right" if text_of(body) == target.wanted[prompt] else "wrong"]
        if status not in ("429", "503", "closed"):
            return [status]
        time.sleep(0.1)
    return ["never answered"]


def text_of(body: bytes) -> str:
    """The text of a completion."""
    return json.loads(body)["choices"][0]["text"]


@dataclass(frozen=True)
class Kind:
    """weight: its share of the cases; refused: an answer 200 is a failure."""

    function: Callable[[random.Random, Target], list[str]]
    weight: float = 1.0
    refused: bool = False


KINDS = {
    "malformed HTTP": Kind(malformed, 2),
    "upgrade": Kind(upgrade, 0.3),
    "chunked body": Kind(chunked, 0.5),
    "pipelined": Kind(pipelined, 0.5),
    "wrong host": Kind(wrong_host, 1, True),
    "wrong origin": Kind(wrong_origin, 1, True),
    "wrong content type": Kind(wrong_type, 1, True),
    "half-open": Kind(half_open, 1.5),
    "trickle": Kind(trickle, 1.5),
    "unfinished body": Kind(unfinished),
    "leaves early": Kind(leaver, 1.2),
    "never reads": Kind(deaf, 0.3),
    "flood": Kind(flood, 0.2),
    "oversize body": Kind(oversize, 0.4, True),
    "heavy JSON": Kind(heavy_json, 1, True),
    "unicode": Kind(unicode),
    "huge prompt": Kind(huge_prompt, 0.7, True),
    "mutated fields": Kind(mutated, 4),
    "adapter changes": Kind(adapters, 0.4),
    "routes and methods": Kind(lost),
    "honest": Kind(honest, 3),
}


def run_case(seed: int, index: int, target: Target) -> tuple[str, list[str]]:
    """Kind and outcomes of case `index` under `seed`."""
    rng = random.Random(f"{seed}/{index}")
    kind = rng.choices(list(KINDS), [k.weight for k in KINDS.values()])[0]
    try:
        return kind, KINDS[kind].function(rng, target)
    except OSError as error:
        return kind, [f"no connection ({type(error).__name__})"]


def is_failure(kind: str, found: str) -> bool:
    """Whether an outcome is one that must not be."""
    if found in ("wrong", "silent", "never answered"):
        return True
    if found.isdigit() and found != "503" and int(found) >= 500:
        return True
    return KINDS[kind].refused and found == "200"
