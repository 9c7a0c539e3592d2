"""`ss-serve` against pages of other sites, strangers, slow clients and heavy bodies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPResponse

import httpx
import pytest
from starlette.testclient import TestClient

from ss_device.errors import UserError
from ss_runtime.commands.serve import main
from ss_runtime.serve.access_rules import AccessRules, check_exposure, chosen_key, rules_for
from ss_runtime.serve.app import make_app
from ss_runtime.serve.engine import Engine
from ss_runtime.serve.json_body import decode_json
from ss_runtime.serve.listening import listen, make_server
from ss_runtime.serve.printable import printable
from ss_runtime.serve.requests import RequestError
from ss_runtime.serve.settings import ConnectionSettings, ServeSettings
from ss_runtime.settings import DraftSettings, RuntimeSettings
from tests.runtime.bundles import make_bundle
from tests.runtime.mlx_cases import CONFIGS

BODY, TOKENS, CONNECTIONS, SECONDS = 1 << 20, 200, 6, 0.6
JSON = {"Content-Type": "application/json"}
ASK = {"model": "one", "prompt": "Hello", "max_tokens": 3}
LOCAL = "http://127.0.0.1:8080"

PLAIN = (RuntimeSettings(dtype="float32"), DraftSettings(plain=True), ServeSettings(queue=2))


@pytest.fixture(scope="module")
def bundle(mlx_base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("security") / "bundle"
    return make_bundle(folder, mlx_base, {"one": CONFIGS["rich"]})


@pytest.fixture(scope="module")
def engine(bundle):
    return Engine(bundle, *PLAIN)


@pytest.fixture(scope="module")
def port(bundle):
    """A server with short deadlines and small send buffers."""
    app = make_app(Engine(bundle, *PLAIN), BODY, TOKENS)
    limits = ConnectionSettings(CONNECTIONS, SECONDS, SECONDS)
    with listen("127.0.0.1", 0, socket.AF_INET, "127.0.0.1") as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        server = make_server(app, limits, False, 5, lambda: None)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive()


def client_of(engine, rules=None, **settings):
    return TestClient(make_app(engine, BODY, TOKENS, rules, **settings), base_url=LOCAL)


@contextmanager
def connected(port, data=b""):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.sendall(data)
        yield sock


def reply(sock):
    """Status and error message of an answer in the JSON form."""
    response = HTTPResponse(sock)
    response.begin()
    return response.status, json.loads(response.read())["error"]["message"]


# Whose requests are answered


@pytest.mark.parametrize(
    ("host", "fits"),
    [
        ("127.0.0.1:8080", True),
        ("localhost", True),
        ("LOCALHOST:1", True),
        ("[::1]:80", True),
        ("box.lan:8080", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("192.168.1.5", False),
        ("", False),
        ("[", False),
        ("127.0.0.1:x", False),
        ("user@127.0.0.1", False),
    ],
)
def test_hosts(engine, host, fits):
    client = client_of(engine, rules_for("127.0.0.1", "127.0.0.1", ["Box.lan"], [], None))
    for path in ("/health", "/v1/models"):
        answer = client.get(path, headers={"Host": host})
        assert answer.status_code == (200 if fits else 421)
        assert fits or "--allow-host" in answer.json()["error"]["message"]


def test_a_wildcard_address_takes_numbers_but_no_names():
    rules = rules_for("0.0.0.0", "0.0.0.0", ["box.lan"], [], "key")
    assert all(rules.host_fits(h) for h in ("192.168.1.5:8080", "[fe80::1]", "box.lan", "localhost"))
    assert not rules.host_fits("evil.example")
    rules = rules_for("box", "192.168.1.5", [], [], "key")
    assert rules.host_fits("192.168.1.5") and rules.host_fits("box") and not rules.host_fits("192.168.1.6")


def test_origins(engine):
    rules = rules_for("127.0.0.1", "127.0.0.1", [], ["https://Chat.example"], "key")
    client, key = client_of(engine, rules), {"Authorization": "Bearer key"}
    for origin in ("https://evil.example", "null", "http://chat.example", LOCAL, ""):
        for method in ("GET", "OPTIONS", "POST"):
            answer = client.request(method, "/v1/models", headers={"Origin": origin, **key, **JSON})
            assert answer.status_code == 403 and "--allow-origin" in answer.json()["error"]["message"]
    good = {"Origin": "https://chat.example"}
    answer = client.get("/v1/models", headers=good | key)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-a"}
    preflight = client.options("/v1/completions", headers=good | asks)
    assert preflight.status_code == 200 and "x-a" in preflight.headers["access-control-allow-headers"]
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert client.get("/v1/models", headers=good).status_code == 401


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", None, "text/json; json"]
)
def test_posts_need_json_as_their_type(engine, kind):
    """Also without a body: what a page can send without a preflight loads no adapter."""
    client = client_of(engine)
    for path, body in (("/v1/completions", json.dumps(ASK)), ("/v1/adapters/one", "")):
        answer = client.post(path, content=body, headers={"Content-Type": kind} if kind else {})
        assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]
    answer = client.post("/v1/adapters/one", headers={"Content-Type": "Application/JSON; charset=utf-8"})
    assert answer.status_code == 200


def test_every_route_but_health_needs_the_key(engine):
    client = client_of(engine, AccessRules(key="secret"))
    for path in ("/v1/models", "/v1/models/one", "/v1/adapters", "/nothing"):
        for given in (None, "secret", "Bearer", "Bearer secre", "Basic secret", "Bearer é"):
            headers = {"Authorization": given.encode()} if given else {}
            answer = client.get(path, headers=headers)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert client.post("/v1/completions", json=ASK).status_code == 401
    key = {"Authorization": "bearer secret"}
    assert client.get("/v1/models", headers=key).status_code == 200
    assert client.get("/health").json() == {"status": "ok"}
    assert "memory" in client.get("/health", headers=key).json()


def test_where_the_key_comes_from(tmp_path):
    file = tmp_path / "key"
    file.write_text("from-file\n")
    assert chosen_key(None, None, None) is None and chosen_key(None, None, "") is None
    assert chosen_key(None, None, "env") == "env" and chosen_key("option", None, "env") == "option"
    assert chosen_key(None, file, "env") == "from-file"
    for wrong, says in (
        (("a", file, None), "not both"),
        ((None, tmp_path / "none", None), "not a readable file"),
        (("", None, None), "--api-key: an API key is one line"),
        ((None, None, "two words"), "SS_SERVE_API_KEY"),
    ):
        with pytest.raises(UserError, match=says):
            chosen_key(*wrong)
    for address in ("0.0.0.0", "::", "192.168.1.5"):
        with pytest.raises(UserError, match="open to other machines"):
            check_exposure(address, None, without_key=False)
        check_exposure(address, "key", without_key=False)
        check_exposure(address, None, without_key=True)
    check_exposure("127.0.0.2", None, without_key=False)
    check_exposure("::1", None, without_key=False)


def test_bad_access_options_are_one_line(bundle, capsys, monkeypatch):
    monkeypatch.delenv("SS_SERVE_API_KEY", raising=False)
    for options, says in (
        (["--host", "0.0.0.0"], "0.0.0.0 is open to other machines"),
        (["--allow-host", "http://box"], "--allow-host 'http://box' is not a host name"),
        (["--allow-origin", "null"], "--allow-origin 'null' is not an origin"),
        (["--allow-origin", "https://a/b"], "is not an origin such as"),
        (["--api-key", "a b"], "--api-key: an API key is"),
        (["--read-timeout", "0"], "not above 0"),
        (["--connections", "0"], "at least 1"),
    ):
        assert main(["--bundle", str(bundle.path), "--port", "0", *options]) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1


# What one client learns of another


def test_cached_tokens_are_told_only_when_asked_for(engine, bundle):
    told = client_of(engine, report_cached=True)
    told.post("/v1/completions", json=ASK)
    usage = told.post("/v1/completions", json=ASK).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 5 and "seconds" in usage["speculation"]
    client = client_of(engine)
    usage = client.post("/v1/completions", json=ASK).json()["usage"]
    assert "prompt_tokens_details" not in usage and "seconds" not in usage["speculation"]
    assert all(set(cache) == {"bytes"} for cache in client.get("/health").json()["memory"]["prompt_caches"])
    forgetful = Engine(bundle, *PLAIN, forget_prompts=True)
    client = client_of(forgetful, report_cached=True)
    for _ in range(2):
        usage = client.post("/v1/completions", json=ASK).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    forgetful.close()


# Heavy and odd bodies


def test_long_prompts_are_refused_before_they_are_read(engine, monkeypatch):
    tokenizer = type(engine.prompts.tokenizer)
    monkeypatch.setattr(tokenizer, "encode", lambda *a: pytest.fail("tokenized"))
    client = client_of(engine)
    chat = {"model": "one", "messages": [{"role": "user", "content": "a" * 900}] * 3}
    for path, body, says in (
        (
            "completions",
            {**ASK, "prompt": "é" * 1000},
            "2000 bytes, the context of 256 tokens holds at most",
        ),
        ("chat/completions", chat, "2712 bytes, the context of 256"),
        ("completions", {**ASK, "prompt": [5] * 200_000}, "200000 tokens, the context holds 256"),
        ("completions", {**ASK, "prompt": [[5] * 300]}, "300 tokens, the context holds 256"),
        ("completions", {**ASK, "stop": "x" * 1001}, "more than 1000 characters"),
    ):
        answer = client.post(f"/v1/{path}", json=body)
        assert answer.status_code == 400 and says in answer.json()["error"]["message"]


def test_health_answers_while_a_prompt_is_read(port, monkeypatch):
    from ss_runtime.tokenization import BundleTokenizer

    encode = BundleTokenizer.encode
    monkeypatch.setattr(BundleTokenizer, "encode", lambda *a: (time.sleep(1.0), encode(*a))[1])
    body = json.dumps(ASK).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with connected(port, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body) as sock:
        time.sleep(0.1)
        start = time.perf_counter()
        assert httpx.get(f"http://127.0.0.1:{port}/health").json()["requests"] == 1
        assert time.perf_counter() - start < 0.6
        response = HTTPResponse(sock)
        response.begin()
        assert response.status == 200


def test_tokenizing_lets_other_threads_run(engine):
    """The longest gap between two turns of another thread, against what one text takes."""
    text, stop, gaps = "the cat sat. " * 40_000, threading.Event(), []

    def watch():
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=watch)
    thread.start()
    start = time.perf_counter()
    engine.prompts.tokenizer.encode(text)
    seconds = time.perf_counter() - start
    stop.set()
    thread.join()
    assert len(gaps) > 3 and max(gaps) < 0.7 * seconds


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [' + b"[]," * 200_000 + b"[]]}",
        b'{"messages": [' + b"{}," * 200_000 + b"{}]}",
        b'{"stop": [' + b"[]," * 200_000 + b"[]]}",
        b'{"prompt": {"a": "' + b"x" * 100_000 + b'"}}',
        b'{"a":' * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"model": "\xff"}',
        rb'{"prompt": "\ud800"}',
    ],
)
def test_bodies_are_read_by_their_types(body):
    start = time.thread_time()
    with pytest.raises(RequestError) as raised:
        decode_json(body)
    assert raised.value.status == 400 and time.thread_time() - start < 0.05


def test_known_fields_of_any_size_are_read():
    messages = [
        {"role": "user", "content": "x" * 40_000},
        {"role": "a", "content": [{"text": "y" * 40_000}]},
    ]
    for prompt in ("x" * 90_000, ["x" * 90_000], [5] * 50_000, [[5] * 50_000]):
        body = {"prompt": prompt, "messages": messages, "top_p": 0.5, "unknown": [[]] * 90_000}
        assert decode_json(json.dumps(body).encode()) == {k: v for k, v in body.items() if k != "unknown"}


def test_nothing_of_a_client_steers_a_terminal(engine):
    assert printable("a\x1b[31m\u202e\ud800\r\n b") == r"a\x1b[31m\u202e\ud800 b"
    assert len(printable("x" * 10**6)) == 300
    answer = client_of(engine).post("/v1/completions", json={**ASK, "model": "\x1b[2J\u202e"})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 404 and message.isprintable() and r"\x1b[2J\u202e" in message
    message = client_of(engine).get("/v1/%1b%00%ff").json()["error"]["message"]
    assert message.isprintable()


def test_penalties_do_not_load_transformers():
    code = (
        "import sys; from ss_runtime.samplers import build_sampler as make;"
        "assert make(0.0, {}, {'repetition': 1.5}).processors; sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# Connections


HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("data", [b"", b"GET /hea", HALF, HALF + b"Content-Length: 50\r\n\r\n{"])
def test_requests_that_do_not_get_on_are_closed(port, data):
    """Bytes that come one by one do not help."""
    with connected(port, data) as sock:
        start = time.perf_counter()
        if data:
            time.sleep(0.5 * SECONDS)
            sock.sendall(b"x")
            status, message = reply(sock)
            assert status == 408 and f"after {SECONDS:g} s" in message
        assert sock.recv(10) == b"" and 0.5 * SECONDS < time.perf_counter() - start < 5 * SECONDS


def test_half_open_connections_leave_room_for_others(port):
    with ExitStack() as open_ones:
        for _ in range(3 * CONNECTIONS):
            open_ones.enter_context(connected(port, b"GET /health HTTP/1.1\r\n"))
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200


def test_a_client_that_does_not_read_loses_its_turn(port):
    body = json.dumps({**ASK, "max_tokens": TOKENS, "stream": True, "temperature": 2, "seed": 1}).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.connect(("127.0.0.1", port))
    with sock:
        sock.sendall(HALF + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(0.2)
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=ASK, timeout=20)
        assert answer.status_code == 200
        health = httpx.get(f"http://127.0.0.1:{port}/health").json()
        assert health["requests"] == 0
        time.sleep(2 * SECONDS)
        sock.settimeout(5)
        found = b""
        with suppress(ConnectionResetError):
            while part := sock.recv(65536):
                found += part
        assert found and b"[DONE]" not in found


@pytest.mark.parametrize(
    ("data", "status", "says"),
    [
        (HALF + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n", 411, "needs a Content-Length"),
        (b"nonsense\r\n\r\n", 400, "invalid HTTP request"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 70_000, 431, "invalid HTTP request"),
        (HALF + b"Content-Length: 99999999\r\n\r\n", 413, "larger than"),
    ],
)
def test_broken_requests_get_json_errors(port, data, status, says, caplog):
    with connected(port, data) as sock:
        found, message = reply(sock)
    assert found == status and says in message and not caplog.records


def test_nonsense_behind_a_request_is_no_traceback(port, caplog):
    body = json.dumps({**ASK, "max_tokens": 60, "stream": True}).encode()
    good = HALF + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    for data in (
        good + b"\0\0\r\n\r\n",
        HALF + b"Content-Length: 10\r\n\r\n" + b"[]        " + b"\0\r\n\r\n",
    ):
        with connected(port, data) as sock:
            while sock.recv(4096):
                pass
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    assert not caplog.records


def test_a_signal_while_a_body_arrives(bundle):
    code = "import sys; from ss_runtime.commands.serve import main; sys.exit(main(sys.argv[1:]))"
    options = ["--bundle", str(bundle.path), "--port", "0", "--nodes", "1"]
    environment = {**os.environ, "SS_SERVE_API_KEY": "secret"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *options], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        port = int(process.stderr.readline().split("/v1")[0].rpartition(":")[2])
        key = b"Authorization: Bearer secret\r\n"
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 401
        with (
            connected(port, HALF) as head,
            connected(port, HALF + key + b"Content-Length: 50\r\n\r\n{") as body,
        ):
            time.sleep(0.3)
            start = time.perf_counter()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0 and time.perf_counter() - start < 8
            assert head.recv(10) == b"" and reply(body)[0] == 503
        assert process.stderr.read() == ""
    finally:
        process.kill()
