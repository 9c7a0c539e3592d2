"""The server on back ends that run a bundle's functions: MLX's answers, streams, refusals, one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import httpx
import openai
import pytest

from ss_device.decoding import Drafter
from ss_device.errors import UserError
from ss_device.sampling import Sampler, Sampling
from ss_runtime.commands.serve import main
from ss_runtime.function_step_model import FunctionStepModel
from ss_runtime.generation import generate
from ss_runtime.mlx.loading import load_model
from ss_runtime.serve.app import make_app
from ss_runtime.serve.engine import Engine
from ss_runtime.serve.settings import ServeSettings
from ss_runtime.settings import DraftSettings, RuntimeSettings
from ss_runtime.tokenization import load_tokenizer
from tests.runtime.bundles import FUNCTION_BACKENDS, convert_bundle
from tests.runtime.mlx_cases import CONFIGS
from tests.runtime.running_server import requests_held, served

BODY, TOKENS = 4000, 80
JSON = {"Content-Type": "application/json"}


def serving(bundle, backend, **engine):
    """A server in float32 that tells what it reused."""
    engine = Engine(bundle, RuntimeSettings(backend, "float32"), **engine)
    return served(make_app(engine, BODY, TOKENS, report_cached=True))


def client_of(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def on_mlx(bundle, name, prompt, count=12, sampler=None):
    """The text of a fresh MLX model, one token per call."""
    model = load_model(bundle, bundle.adapter(name), RuntimeSettings(dtype="float32"))
    tokenizer = load_tokenizer(bundle)
    ids = tokenizer.encode(prompt)
    return generate(model, Drafter(1), ids, count, frozenset([2]), (), tokenizer, sampler).text


@pytest.fixture(scope="module", params=FUNCTION_BACKENDS)
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def address(function_bundle, backend):
    with serving(function_bundle, backend, drafts=DraftSettings(lookup=True)) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    return client_of(address)


@pytest.mark.parametrize("prompt", ["Hello", "Hello, hello, hello", "Hello, hello, and so on"])
def test_answers_are_those_of_mlx(client, function_bundle, prompt):
    """Adapters take turns; what a prompt has in common with the one before is not computed again."""
    for name in ("one", "v1", "two", "v2", "one"):
        answer = client.completions.create(model=name, prompt=prompt, max_tokens=12)
        assert answer.choices[0].text == on_mlx(function_bundle, name, prompt)
    again = client.completions.create(model="two", prompt=prompt, max_tokens=12)
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    assert again.choices[0].text == on_mlx(function_bundle, "two", prompt)


def test_streams_join_to_the_whole(client, function_bundle):
    ask = {"model": "v1", "max_tokens": 12, "stream": True}
    parts = client.completions.create(prompt="Hello", **ask)
    assert "".join(e.choices[0].text for e in parts) == on_mlx(function_bundle, "v1", "Hello")
    events = list(client.chat.completions.create(messages=[{"role": "user", "content": "Hello"}], **ask))
    text = "".join(e.choices[0].delta.content or "" for e in events)
    assert text == on_mlx(function_bundle, "v1", "Hello") and events[-1].choices[0].finish_reason


def test_a_client_that_leaves_ends_its_generation(client, address, function_bundle, monkeypatch):
    """Between two calls; what follows is right, for the same adapter and for another one on its text."""
    step, calls = FunctionStepModel.step, []

    def slow(*arguments, **options):
        calls.append(1)
        time.sleep(0.05)
        return step(*arguments, **options)

    monkeypatch.setattr(FunctionStepModel, "step", slow)
    with client.completions.create(model="one", prompt="Hello", max_tokens=80, stream=True) as events:
        next(iter(events))
        events.close()
    assert requests_held(address, 0) == 0
    made = len(calls)
    time.sleep(0.3)
    assert len(calls) == made
    for name in ("two", "one"):
        answer = client.completions.create(model=name, prompt="Hello", max_tokens=12)
        assert answer.choices[0].text == on_mlx(function_bundle, name, "Hello")


def test_health_and_models_tell_the_back_end(client, address, backend, function_bundle):
    on = {"backend": backend, "dtype": "float32"}
    health = httpx.get(f"{address}/health").json()
    assert {name: health[name] for name in on} == on
    assert set(health["memory"]["adapters"]) == {"one", "two", "v1", "v2"}
    assert health["memory"]["base"] > 0 and health["memory"]["prompt_caches"][0]["bytes"] is None
    models = httpx.get(f"{address}/v1/models").json()["data"]
    assert [entry["id"] for entry in models] == ["one", "two", "v1", "v2"]
    assert all(entry | on == entry for entry in models)
    with pytest.raises(openai.NotFoundError, match="no adapter 'tiny-base' is loaded"):
        client.models.retrieve("tiny-base")


def test_adapters_are_loaded_and_unloaded_while_it_runs(client, address, function_bundle):
    assert not httpx.delete(f"{address}/v1/adapters/two", headers=JSON).json()["data"][1]["loaded"]
    with pytest.raises(openai.NotFoundError, match="loaded: one, v1, v2"):
        client.completions.create(model="two", prompt="Hello", max_tokens=12)
    assert httpx.post(f"{address}/v1/adapters/two", headers=JSON).json()["data"][1]["loaded"]
    answer = client.completions.create(model="two", prompt="Hello", max_tokens=12)
    assert answer.choices[0].text == on_mlx(function_bundle, "two", "Hello")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"temperature": 0.8}, "chooses greedily inside its graph: no sampling and no penalties"),
        ({"presence_penalty": 1.0}, "chooses greedily inside its graph: no sampling and no penalties"),
        ({"prompt": "a" * 100}, "the prompt has 101 tokens, the context holds 96"),
    ],
)
def test_what_the_functions_cannot_do_is_a_bad_request(address, asked, says):
    body = {"model": "one", "prompt": "Hello", "max_tokens": 12, **asked}
    for stream in (False, True):
        answer = httpx.post(f"{address}/v1/completions", json={**body, "stream": stream})
        assert answer.status_code == 400 and says in answer.json()["error"]["message"]


def test_functions_with_logits_draw_what_mlx_draws(half_base, tmp_path, backend):
    """`--sampling`, and pruning in the graph."""
    target = {"executor": "coreml"}.get(backend, backend)
    options = ("--target", f"mlx,{target}", "--sampling", "--keep", "6")
    bundle = convert_bundle(tmp_path / "bundle", half_base, {"one": CONFIGS["rich"]}, *options)
    with serving(bundle, backend) as address:
        ask = {"model": "one", "prompt": "Hello", "max_tokens": 20, "temperature": 1.3}
        texts = [client_of(address).completions.create(**ask, seed=seed).choices[0].text for seed in (1, 2)]
        greedy = client_of(address).completions.create(**{**ask, "temperature": 0}).choices[0].text
    samplers = [Sampler(sampling=Sampling(temperature=1.3, seed=seed)) for seed in (1, 2)]
    assert texts == [on_mlx(bundle, "one", "Hello", 20, sampler) for sampler in samplers]
    assert greedy == on_mlx(bundle, "one", "Hello", 20) and len({*texts, greedy}) == 3


def test_every_prompt_from_its_beginning(function_bundle, backend):
    settings = ServeSettings(adapters=("one",))
    with serving(function_bundle, backend, settings=settings, forget_prompts=True) as address:
        ask = {"model": "one", "prompt": "Hello", "max_tokens": 6}
        answers = [client_of(address).completions.create(**ask) for _ in range(2)]
    assert [a.usage.prompt_tokens_details.cached_tokens for a in answers] == [0, 0]
    assert answers[0].choices[0].text == answers[1].choices[0].text


def test_the_command_needs_no_mlx_weights(half_base, tmp_path, backend):
    """A bundle of functions alone; the first line says where they run, a signal ends it with code 0."""
    target = {"executor": "coreml"}.get(backend, backend)
    bundle = convert_bundle(tmp_path / "bundle", half_base, {"one": CONFIGS["rich"]}, "--target", target)
    code = "import sys; from ss_runtime.commands.serve import main; sys.exit(main(sys.argv[1:]))"
    options = ("--backend", backend, "--dtype", "float32", "--bundle", str(bundle.path), "--port", "0")
    command = [sys.executable, "-c", code, *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ.copy())
    try:
        line = process.stderr.readline()
        assert line.startswith("one at http://") and f"on {backend} in float32 (" in line
        url = line.split(" at ")[1].split()[0]
        ask = {"model": "one", "prompt": "Hello", "max_tokens": 4, "stream": True}
        answer = httpx.post(f"{url}/completions", json=ask, timeout=60)
        assert answer.status_code == 200
        assert json.loads(answer.text.split("\n")[0].removeprefix("data: "))["choices"][0]["text"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0 and process.stderr.read() == ""
    finally:
        process.kill()


def test_bad_options_are_one_line(function_bundle, half_base, tmp_path, capfd, monkeypatch):
    configs = {"one": CONFIGS["bare"]}
    mlx_alone = convert_bundle(tmp_path / "mlx", half_base, configs, "--target", "mlx")
    functions = convert_bundle(tmp_path / "coreml", half_base, configs, "--target", "coreml")
    monkeypatch.setattr(sys, "platform", "linux")
    capfd.readouterr()
    for bundle, options, says in (
        (function_bundle, ("executor", "--quantize", "4"), "leave --quantize out"),
        (function_bundle, ("executor", "--kv-bits", "8"), "leave --kv-bits out"),
        (function_bundle, ("executor", "--compute-units", "gpu"), "--compute-units is for back ends"),
        (function_bundle, ("mlx", "--compute-units", "gpu"), "--compute-units is for back ends"),
        (function_bundle, ("executor", "--dtype", "bfloat16"), "does not compute in bfloat16"),
        (function_bundle, ("executor", "--nodes", "13"), "made for at most 12 nodes"),
        (function_bundle, ("coreml",), "Core ML runs on a Mac only"),
        (mlx_alone, ("executor",), "the bundle has no Core ML package"),
        (mlx_alone, ("coreai",), "the bundle has no Core AI asset"),
        (functions, ("mlx",), "the bundle has no MLX weights"),
    ):
        assert main(["--bundle", str(bundle.path), "--port", "0", "--backend", *options]) == 2
        error = capfd.readouterr().err
        assert says in error and error.count("\n") == 1
    assert main(["--bundle", str(mlx_alone.path), "--backend", "reference"]) == 2
    assert "invalid choice: 'reference'" in capfd.readouterr().err
    with pytest.raises(UserError, match="does not run on back end 'reference'"):
        Engine(mlx_alone, RuntimeSettings("reference"))
