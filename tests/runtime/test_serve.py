"""The server through the `openai` client and raw HTTP: answers, streams, limits, disconnects, shutdown."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from ss_device.decoding import Drafter
from ss_runtime.commands.serve import main
from ss_runtime.generation import generate
from ss_runtime.mlx.loading import load_model
from ss_runtime.mlx.step_model import MLXStepModel
from ss_runtime.serve.app import make_app
from ss_runtime.serve.engine import Engine
from ss_runtime.serve.requests import RequestError
from ss_runtime.serve.settings import ServeSettings
from ss_runtime.settings import DraftSettings, RuntimeSettings
from ss_runtime.tokenization import load_tokenizer
from ss_runtime.tuning import device_name
from tests.runtime.bundles import make_bundle
from tests.runtime.mlx_cases import CONFIGS, SHARED
from tests.runtime.running_server import requests_held, served

QUEUE, BODY, TOKENS = 2, 4000, 150
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def bundle(mlx_base, tmp_path_factory):
    configs = {"one": CONFIGS["rich"], "two": SHARED[False]}
    return make_bundle(tmp_path_factory.mktemp("serve") / "bundle", mlx_base, configs)


@pytest.fixture(scope="module")
def address(bundle):
    engine = Engine(
        bundle,
        RuntimeSettings(dtype="float32"),
        DraftSettings(lookup=True),
        ServeSettings(queue=QUEUE),
    )
    with served(make_app(engine, BODY, TOKENS, report_cached=True)) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def expected(bundle):
    """Texts of fresh models, one token per call: (adapter, prompt, max tokens) → text."""
    tokenizer, models = load_tokenizer(bundle), {}

    def text(name, prompt, count=12):
        if name not in models:
            models[name] = load_model(bundle, bundle.adapter(name), RuntimeSettings(dtype="float32"))
        ids = tokenizer.encode(prompt)
        return generate(models[name], Drafter(1), ids, count, frozenset([2]), (), tokenizer).text

    return text


def test_models_and_health(client, address):
    assert [m.id for m in client.models.list()] == ["one", "two", "base"]
    health = httpx.get(f"{address}/health").json()
    assert health["status"] == "ok" and set(health["memory"]["adapters"]) == {"one", "two"}


@pytest.mark.parametrize("name", ["one", "two"])
def test_answers_are_those_of_a_fresh_load(client, expected, name):
    whole = client.completions.create(model=name, prompt="Hello", max_tokens=12)
    assert whole.choices[0].text == expected(name, "Hello")
    assert whole.model == name and whole.choices[0].finish_reason in ("stop", "length")
    usage = whole.usage
    assert usage.prompt_tokens == 6 and usage.total_tokens == 6 + usage.completion_tokens
    assert usage.model_extra["speculation"]["model_calls"] <= usage.completion_tokens - 1
    chat = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": "Hello"}], max_tokens=12
    )
    assert chat.choices[0].message.content == expected(name, "Hello")


def test_the_base_alone_and_common_beginnings(client, expected, bundle):
    """The base says what its lossless adapter says; the second request computes only what is new."""
    ask = {"prompt": "Hello, hello, hello", "max_tokens": 12}
    first = client.completions.create(model="one", **ask)
    alone = client.completions.create(model="base", **ask)
    assert alone.choices[0].text == first.choices[0].text == expected("one", ask["prompt"])
    assert alone.usage.prompt_tokens_details.cached_tokens == alone.usage.prompt_tokens - 1
    longer = client.completions.create(model="one", prompt="Hello, hello, help", max_tokens=2)
    assert longer.usage.prompt_tokens_details.cached_tokens == len("Hello, hello, hel") + 1


def test_adapters_are_loaded_and_unloaded_while_it_runs(client, address, expected):
    """Requests that wait while their adapter goes away get one error; the others their answers."""
    listed = httpx.get(f"{address}/v1/adapters").json()["data"]
    assert [(a["id"], a["loaded"]) for a in listed] == [("one", True), ("two", True)]
    assert all(a["bytes"] > 0 for a in listed)
    with client.completions.create(model="one", prompt="Hello", max_tokens=140, stream=True) as events:
        next(iter(events))
        with ThreadPoolExecutor(2) as pool:
            gone = pool.submit(httpx.delete, f"{address}/v1/adapters/two", timeout=60)
            time.sleep(0.2)
            ask = {"model": "two", "prompt": "Hello", "max_tokens": 4, "stream": True}
            late = pool.submit(httpx.post, f"{address}/v1/completions", json=ask, timeout=60)
            time.sleep(0.2)
            list(events)
            assert [a["loaded"] for a in gone.result().json()["data"]] == [True, False]
            assert late.result().status_code == 404
            assert "'two' is loaded" in late.result().json()["error"]["message"]
    assert [m.id for m in client.models.list()] == ["one", "base"]
    for method, name, says in (
        (httpx.delete, "two", "no adapter 'two'"),
        (httpx.delete, "base", "is the base"),
        (httpx.post, "three", "no adapter 'three'"),
    ):
        answer = method(f"{address}/v1/adapters/{name}", headers=JSON)
        assert answer.status_code == 404 and says in answer.json()["error"]["message"]
    assert httpx.get(f"{address}/v1/adapters/two").status_code == 405
    assert httpx.post(f"{address}/v1/adapters/two", headers=JSON).json()["data"][1]["loaded"]
    answer = client.completions.create(model="two", prompt="Hello", max_tokens=12)
    assert answer.choices[0].text == expected("two", "Hello")


def test_streams_join_to_the_whole(client, expected):
    events = client.chat.completions.create(
        model="one",
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    events = list(events)
    assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == expected(
        "one", "Hello"
    )
    assert [e.choices[0].finish_reason for e in events if e.choices][-1] is not None
    assert events[0].choices[0].delta.role == "assistant" and events[-1].usage.completion_tokens > 0
    parts = client.completions.create(model="two", prompt="Hello", max_tokens=12, stream=True)
    assert "".join(e.choices[0].text for e in parts) == expected("two", "Hello")


def test_sampling_stops_and_token_prompts(client, bundle, expected):
    ask = {"model": "one", "prompt": "Hello", "max_tokens": 20}
    drawn = [client.completions.create(**ask, temperature=1.5, seed=s).choices[0].text for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    text = expected("one", "Hello", 20)
    cut = client.completions.create(**ask, stop=[text[2:4]]).choices[0]
    assert cut.text == text[: text.index(text[2:4])] and cut.finish_reason == "stop"
    ids = load_tokenizer(bundle).encode("Hello")
    assert client.completions.create(**{**ask, "prompt": ids}).choices[0].text == text


def test_penalties_and_a_lossy_choice(client, expected):
    ask = {"model": "one", "prompt": "Hello", "max_tokens": 20}
    spoken = client.completions.create(**ask, presence_penalty=1.9, extra_body={"repetition_penalty": 3.0})
    assert spoken.choices[0].text != expected("one", "Hello", 20)
    assert spoken.usage.model_extra["speculation"]["lossy_typical"] is None
    lossy = client.completions.create(**ask, temperature=1, seed=1, extra_body={"lossy_typical": 0.01})
    assert lossy.usage.model_extra["speculation"]["lossy_typical"] == 0.01


BAD = [
    ("completions", {"prompt": "a", "lossy_typical": 0.3}, 400, "typical acceptance needs"),
    ("completions", {"prompt": "a", "temperature": 1, "lossy_typical": 7}, 400, "epsilon"),
    ("completions", {"prompt": "a", "repetition_penalty": -1}, 400, "repetition penalty"),
    ("completions", {"prompt": ""}, 400, "prompt"),
    ("completions", {"prompt": [1, 9999]}, 400, "token ids"),
    ("completions", {"prompt": "a", "n": 2}, 400, "'n' is not supported"),
    ("completions", {"prompt": "a", "max_tokens": 1000}, 400, "between 1 and 150"),
    ("completions", {"prompt": "a", "max_tokens": "x"}, 400, "expected int"),
    ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
    ("completions", {"prompt": "a", "temperature": 1, "top_p": 3}, 400, "top-p"),
    ("completions", {"prompt": "a", "stop": [1]}, 400, "'stop'"),
    ("completions", {"prompt": "a", "model": "three"}, 404, "loaded: one, two"),
    ("completions", {"prompt": "a" * 300}, 400, "the context holds 256"),
    ("completions", {"prompt": "a" * 5000}, 413, "4000 bytes"),
    ("completions", [], 400, "JSON object"),
    ("completions", {"prompt": "a", "max_completion_tokens": 0}, 400, "between 1 and 150"),
    ("completions", {"prompt": "a", "max_tokens": True}, 400, "expected int"),
    ("completions", {"prompt": "a", "model": 5}, 400, "expected str"),
    ("completions", {"prompt": "a", "stream": "yes"}, 400, "expected bool"),
    ("completions", {"prompt": "a", "stream_options": 1}, 400, "expected dict"),
    ("completions", {"prompt": "a", "temperature": 1, "seed": 2**70}, 400, "seed"),
    ("completions", {"prompt": "a", "temperature": 1, "top_k": -1}, 400, "top-k"),
    ("completions", {"prompt": "a", "frequency_penalty": "much"}, 400, "frequency_penalty"),
    ("completions", {"prompt": "a", "stop": ["a"] * 5}, 400, "at most 4"),
    ("completions", {"prompt": [[1], [2]]}, 400, "one list of token ids"),
    ("completions", {"prompt": "a", "model": "x\ny"}, 404, "no adapter"),
    ("adapters/three", {}, 404, "no adapter 'three'"),
    ("chat/completions", {"messages": []}, 400, "at least one"),
    ("chat/completions", {"messages": [{"role": "user"}]}, 400, "content"),
    ("chat/completions", {"messages": ["x"]}, 400, "role"),
    ("nothing", {}, 404, "Not Found"),
]


@pytest.mark.parametrize(("route", "body", "status", "says"), BAD)
def test_bad_requests_get_one_json_error(address, route, body, status, says):
    if isinstance(body, dict):
        body = {"model": "one", **body}
    answer = httpx.post(f"{address}/v1/{route}", json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert says in error["message"] and "\n" not in error["message"]


def test_broken_json(address):
    bad = (b"{", b"\xff", b"[" * 3000, b"", b'{"temperature": NaN}', rb'{"prompt": "\ud800"}', b"1e999,")
    for content in bad:
        answer = httpx.post(f"{address}/v1/completions", content=content, headers=JSON)
        assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]


def test_numbers_beyond_floats_and_other_methods(address):
    body = b'{"model": "one", "prompt": "a", "temperature": 1e999}'
    huge = httpx.post(f"{address}/v1/completions", content=body, headers=JSON)
    assert huge.status_code == 400 and "finite" in huge.json()["error"]["message"]
    integers = ("seed", "top_k", "max_tokens", "max_completion_tokens")
    numbers = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "lossy_typical")
    for name in (*integers, *numbers):
        for value in (10**400, -(10**400)):
            body = {"model": "one", "prompt": "a", "temperature": 1, name: value}
            answer = httpx.post(f"{address}/v1/completions", json=body)
            error = answer.json()["error"]["message"]
            assert answer.status_code == 400 and name.split("_")[0] in error and len(error) < 100
    for method, route in (
        (httpx.get, "completions"),
        (httpx.delete, "models"),
        (httpx.put, "adapters/one"),
    ):
        answer = method(f"{address}/v1/{route}", headers=JSON)
        assert answer.status_code == 405 and "Not Allowed" in answer.json()["error"]["message"]


def test_a_model_by_its_name(client, address):
    assert client.models.retrieve("one").id == "one" and client.models.retrieve("base").object == "model"
    with pytest.raises(openai.NotFoundError, match="no adapter 'three'"):
        client.models.retrieve("three")


def test_a_defect_in_the_middle_of_a_stream(client, address, expected, monkeypatch, caplog):
    """One error event ends the stream, the log has the traceback, the next request gets its answer."""
    step, calls = MLXStepModel.step, []

    def broken(*arguments, **options):
        calls.append(1)
        if len(calls) > 2:
            raise ValueError("a defect")
        return step(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(MLXStepModel, "step", broken)
        ask = {"model": "one", "prompt": "Hello", "max_tokens": 100, "stream": True}
        answer = httpx.post(f"{address}/v1/completions", json=ask)
    last = [line for line in answer.text.splitlines() if line][-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == 500 and "internal error" in error["message"]
    assert "a defect" in caplog.text
    assert requests_held(address, 0) == 0
    answer = client.completions.create(model="one", prompt="Hello", max_tokens=12)
    assert answer.choices[0].text == expected("one", "Hello")


def test_a_stale_tuning_is_refused_when_a_model_is_loaded(bundle, capsys):
    """At the start and later: one line, one JSON error; nothing is loaded half."""
    choice = {"num_nodes": 7, "shape": "best-first", "lookup": False, "max_streams": None}
    tuned = {"format_version": 2, "devices": {device_name(): {"two:float32": {"choice": choice}}}}
    stale, damaged = json.dumps(tuned), json.dumps(tuned).replace("7", '"7"')
    file = bundle.path / "tuning.json"
    try:
        for content, says in ((stale, "tuned for 7 nodes"), (damaged, "num_nodes is '7'"), ("{", "JSON")):
            file.write_text(content)
            command = ["--bundle", str(bundle.path), "--port", "0", "--adapters", "two"]
            assert main([*command, "--dtype", "float32"]) == 2
            error = capsys.readouterr().err
            assert says in error and error.count("\n") == 1
        file.write_text(stale)
        engine = Engine(
            bundle, RuntimeSettings(dtype="float32"), settings=ServeSettings(queue=1, adapters=())
        )
        with pytest.raises(RequestError, match="tuned for 7 nodes"):
            asyncio.run(engine.change("two", load=True))
        assert engine.bank.names == []
        file.unlink()
        asyncio.run(engine.change("two", load=True))
        assert engine.bank.names == ["two"]
        engine.close()
    finally:
        file.unlink(missing_ok=True)


def test_many_clients_some_of_which_leave(client, address, expected):
    """25 requests from 8 clients: every whole answer is right, 429 is the only refusal, nothing leaks."""
    wanted = {(m, p): expected(m, p) for m in ("one", "two") for p in ("Hello", "Hello there", "x")}
    outcomes = []

    def one(number):
        model, prompt = sorted(wanted)[number % len(wanted)]
        ask = {"model": model, "prompt": prompt, "max_tokens": 12}
        if number % 5 == 4:
            with client.completions.create(**{**ask, "max_tokens": 100}, stream=True) as events:
                next(iter(events))
            return "left"
        try:
            return client.completions.create(**ask).choices[0].text == wanted[model, prompt]
        except openai.RateLimitError as error:
            assert "waiting" in str(error)
            return "full"

    def patient(number):
        while (outcome := _no_limit(one, number)) == "full":
            outcomes.append(outcome)
            time.sleep(0.05)
        outcomes.append(outcome)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(patient, range(25)))
    assert outcomes.count(True) == 20 and outcomes.count("left") == 5 and False not in outcomes
    assert "full" in outcomes
    deadline = time.time() + 10
    while (running := httpx.get(f"{address}/health").json()["requests"]) and time.time() < deadline:
        time.sleep(0.05)
    assert running == 0


def test_waiting_clients_that_leave_free_their_places(client, address, bundle, expected, monkeypatch):
    """A full queue of whole answers, streams and adapter changes whose sockets close before their turn."""
    step = MLXStepModel.step
    monkeypatch.setattr(MLXStepModel, "step", lambda *a, **k: (time.sleep(0.05), step(*a, **k))[1])
    host, port = address.removeprefix("http://").split(":")
    ask = {"model": "one", "prompt": "Hello", "max_tokens": 140}
    waiting = [("POST", "/v1/completions", ask), ("POST", "/v1/completions", {**ask, "stream": True})]
    with client.completions.create(**ask, stream=True) as events:
        next(iter(events))
        for calls in (waiting, [waiting[0], ("DELETE", "/v1/adapters/two", {})]):
            sockets = []
            for method, route, body in calls:
                connection = http.client.HTTPConnection(host, int(port))
                connection.request(method, route, json.dumps(body), JSON)
                sockets.append(connection)
            assert requests_held(address, 1 + QUEUE) == 1 + QUEUE
            assert httpx.post(f"{address}/v1/completions", json=ask).status_code == 429
            for connection in sockets:
                connection.close()
            assert requests_held(address, 1) == 1
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(client.completions.create, model="two", prompt="Hello", max_tokens=12)
            assert requests_held(address, 2) == 2
            events.close()
            assert late.result().choices[0].text == expected("two", "Hello")
    assert requests_held(address, 0) == 0


def _no_limit(function, number):
    try:
        return function(number)
    except openai.RateLimitError:  # of a stream
        return "full"


def _has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        return True
    except OSError:
        return False


IPV6 = pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 on this machine")


@pytest.mark.parametrize(
    "options",
    [(), ("--host", "localhost"), pytest.param(("--nodes", "4", "--host", "::1"), marks=IPV6)],
)
def test_command_serves_and_ends_at_a_signal(bundle, options):
    """Without a draft that was asked for or tuned, and on a CPU, a line says so."""
    code = "import sys; from ss_runtime.commands.serve import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "--bundle", str(bundle.path), "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ.copy())
    try:
        line = process.stderr.readline()
        base = line.split(" at ")[1].split()[0]
        answer = httpx.post(f"{base}/completions", json={"model": "one", "prompt": "a", "max_tokens": 3})
        assert answer.status_code == 200 and json.loads(answer.text)["choices"][0]["text"] is not None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        hint = "one, two: not tuned for this device" if sys.platform != "darwin" else ""
        rest = process.stderr.read()
        assert rest == "" if "--nodes" in options else (hint in rest and rest.count("\n") == bool(hint))
        assert ("[::1]" in base) == ("::1" in options)
    finally:
        process.kill()


SLOW_SERVER = """
import sys, time
import ss_runtime.commands.serve as command
from ss_runtime.mlx.step_model import MLXStepModel
command.SHUTDOWN_SECONDS = 0.5
step = MLXStepModel.step
MLXStepModel.step = lambda *a, **k: (time.sleep(0.1), step(*a, **k))[1]
sys.exit(command.main(sys.argv[1:]))
"""


def test_a_signal_in_the_middle_of_an_answer(bundle):
    """The running answer ends with an error event, the waiting one gets 503, nothing is logged, code 0."""
    command = [
        sys.executable,
        "-c",
        SLOW_SERVER,
        "--bundle",
        str(bundle.path),
        "--port",
        "0",
        "--nodes",
        "1",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ.copy())
    try:
        base = process.stderr.readline().split(" at ")[1].split()[0]
        ask = {"model": "one", "prompt": "Hello", "max_tokens": 200}
        with (
            ThreadPoolExecutor(1) as pool,
            httpx.stream("POST", f"{base}/completions", json={**ask, "stream": True}, timeout=60) as events,
        ):
            lines = events.iter_lines()
            next(lines)
            waiting = pool.submit(httpx.post, f"{base}/completions", json=ask, timeout=60)
            while httpx.get(base.replace("v1", "health"), timeout=60).json()["requests"] < 2:
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
            assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
            assert waiting.result().status_code == 503
            assert "shutting down" in waiting.result().json()["error"]["message"]
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()


def test_bad_options_are_one_line(bundle, tmp_path, capsys):
    for options, says in (
        (["--bundle", str(tmp_path)], "not a bundle"),
        (["--bundle", str(bundle.path), "--port", "99999"], "port 99999"),
        (["--bundle", str(bundle.path), "--host", "203.0.113.7", "--without-api-key"], "cannot listen"),
        (["--bundle", str(bundle.path), "--host", "no such host"], "cannot listen"),
        (["--bundle", str(bundle.path), "--port", "0", "--nodes", "7"], "'one' was made for at most 6"),
        (["--bundle", str(bundle.path), "--port", "0", "--adapters", "one,three"], "no adapter 'three'"),
        (["--bundle", str(bundle.path), "--port", "0", "--quantize", "4"], "do not divide its rows"),
    ):
        assert main(options) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1
