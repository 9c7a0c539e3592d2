"""The Python interface: mlx-lm's names and responses over bundles and base folders."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx_lm.sample_utils import make_logits_processors as mlx_lm_processors
from mlx_lm.sample_utils import make_sampler as mlx_lm_sampler

import ss_runtime
from ss_device.adapter import save_adapter
from ss_device.errors import UserError
from ss_runtime import (
    DraftSettings,
    RuntimeSettings,
    generate,
    load,
    load_prompt_cache,
    make_logits_processors,
    make_prompt_cache,
    make_sampler,
    save_prompt_cache,
    stream_generate,
)
from ss_runtime.commands.generate import main as ss_generate
from tests.runtime.bundles import make_bundle
from tests.runtime.mlx_cases import CONFIGS, SHARED
from tests.tiny_models import random_adapter

PROMPT = "SELECT name FROM t WHERE a = 1"
FLOAT32 = RuntimeSettings(dtype="float32")
FIELDS = (
    "text", "token", "from_draft", "prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps",
    "peak_memory", "finish_reason",
)  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, mlx_base):
    folder = tmp_path_factory.mktemp("api") / "bundle"
    configs = {"one": CONFIGS["paper"], "two": CONFIGS["rich"], "v1": SHARED[False]}
    return make_bundle(folder, mlx_base, configs)


@pytest.fixture(scope="module")
def loaded(bundle):
    return load(bundle.path, adapter="one", settings=FLOAT32)


def tokens_of(model, tokenizer, prompt=PROMPT, count=24, **options):
    return [r.token for r in stream_generate(model, tokenizer, prompt, max_tokens=count, **options)]


def test_text_is_the_commands(bundle, loaded, capsys):
    words = ["--bundle", str(bundle.path), "--adapter", "one", "--prompt", PROMPT, "--max-tokens", "24"]
    assert ss_generate([*words, "--dtype", "float32", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    responses = list(stream_generate(*loaded, PROMPT, max_tokens=24))
    assert [r.token for r in responses] == said["token_ids"]
    assert "".join(r.text for r in responses) == said["text"] == generate(*loaded, PROMPT, max_tokens=24)
    last = responses[-1]
    assert last.model_calls == said["steps"] and last.finish_reason == said["finish_reason"]
    assert last.tokens_per_call == pytest.approx(said["tokens_per_call"])
    assert last.prompt_tokens == said["prompt_tokens"]


def test_responses_count_and_measure(loaded):
    responses = list(stream_generate(*loaded, PROMPT, max_tokens=20, logits_processors=[]))
    assert [r.generation_tokens for r in responses] == list(range(1, len(responses) + 1))
    assert all(hasattr(responses[0], name) for name in FIELDS)
    assert [r.finish_reason for r in responses[:-1]] == [None] * (len(responses) - 1)
    assert responses[0].model_calls == 0 and responses[0].tokens_per_call is None
    assert responses[0].prompt_tps > 0 and responses[-1].generation_tps > 0
    assert responses[-1].peak_memory > 0
    drafted = sum(r.from_draft for r in responses)
    assert (
        drafted == len(responses) - 1 - responses[-1].model_calls or responses[-1].finish_reason == "length"
    )


def script(package: str, path: str, prompt: list[int]) -> list[int]:
    """Ten lines of a user of mlx-lm, of which the import changes alone."""
    library = importlib.import_module(package)
    model, tokenizer = library.load(path)
    tokens = []
    for response in library.stream_generate(model, tokenizer, prompt, max_tokens=30):
        tokens.append(response.token)
        assert isinstance(response.text, str) and response.prompt_tokens == len(prompt)
        if response.finish_reason:
            break
    return tokens


def test_a_script_for_mlx_lm_works_with_its_import_changed(tmp_path, mlx_base, monkeypatch):
    """Token for token, in the folder's float32. mlx-lm reads the older spelling of the rotary base."""
    folder = tmp_path / "base"
    folder.mkdir()
    for file in mlx_base.path.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config.setdefault("rope_theta", (config.get("rope_parameters") or {}).get("rope_theta", 10000.0))
    (folder / "config.json").write_text(json.dumps(config))
    prompt = np.random.default_rng(0).integers(3, 259, 12).tolist()
    ours = script("ss_runtime", str(folder), prompt)
    assert ours == script("mlx_lm", str(folder), prompt) and len(ours) == 30


def test_a_base_folder_alone_says_what_hugging_face_says(mlx_base, hugging_face):
    model, tokenizer = load(mlx_base.path, settings=FLOAT32)
    ids = tokenizer.encode(PROMPT)
    wanted = hugging_face.generate(
        torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(ids) :].tolist()
    found = tokens_of(model, tokenizer, ids, 20)
    assert found == wanted[: len(found)] and model.name == mlx_base.path.name


def test_an_adapter_folder_beside_a_base_folder(tmp_path, mlx_base):
    """A lossless adapter: the base's own text, some of it drafted."""
    adapter = random_adapter(mlx_base, CONFIGS["paper"])
    save_adapter(adapter, mlx_base.architecture, tmp_path / "adapter")
    plain = load(mlx_base.path, settings=FLOAT32)
    drafts = DraftSettings(lookup=True)
    drafted = load(mlx_base.path, tmp_path / "adapter", settings=FLOAT32, drafts=drafts)
    assert tokens_of(*drafted, count=60) == tokens_of(*plain, count=60)
    assert any(r.from_draft for r in stream_generate(*drafted, PROMPT, max_tokens=60))


def test_bases_and_adapters_by_their_names(tmp_path, mlx_base, monkeypatch):
    (tmp_path / "base").mkdir()
    (tmp_path / "base/tiny").symlink_to(mlx_base.path)
    save_adapter(
        random_adapter(mlx_base, CONFIGS["paper"]), mlx_base.architecture, tmp_path / "adapters/mine"
    )
    monkeypatch.setenv("SS_MODELS", str(tmp_path))
    named = load("tiny", "mine", settings=FLOAT32)
    plain = load(mlx_base.path, settings=FLOAT32)
    assert tokens_of(*named) == tokens_of(*plain) and named[0].adapter.tensor_file == "mine"
    with pytest.raises(UserError, match="unknown adapter 'yours' .found: mine."):
        load("tiny", "yours")


def test_prompts_may_be_text_ids_or_an_array(loaded):
    ids = loaded[1].encode(PROMPT)
    assert tokens_of(*loaded, ids) == tokens_of(*loaded, mx.array(ids)) == tokens_of(*loaded)
    with pytest.raises(UserError, match="neither text nor a list of token ids"):
        tokens_of(*loaded, ["a", "b"])
    with pytest.raises(UserError, match="prompt is empty"):
        tokens_of(*loaded, [])
    with pytest.raises(UserError, match="max tokens must be at least 1"):
        tokens_of(*loaded, count=0)


def test_minus_one_is_as_many_tokens_as_the_context_holds(bundle):
    model, tokenizer = load(bundle.path, "one", settings=RuntimeSettings(dtype="float32", context=40))
    ids = tokenizer.encode("ab")
    responses = list(stream_generate(model, tokenizer, ids, max_tokens=-1))
    assert responses[-1].finish_reason == "stop" or len(responses) == 40 - len(ids) + 1


def test_seeded_sampling_is_the_same_with_drafts_and_without(bundle, loaded):
    plain = load(bundle.path, "one", settings=FLOAT32, drafts=DraftSettings(plain=True))
    for seed in range(3):
        sampler = make_sampler(temp=0.9, top_p=0.95, top_k=40, min_p=0.01, seed=seed)
        assert tokens_of(*loaded, sampler=sampler) == tokens_of(*plain, sampler=sampler)
    assert make_sampler() is None and make_sampler(temp=0.0, top_p=0.9) is None


def test_mlx_lms_samplers_and_processors_are_taken(loaded):
    greedy = tokens_of(*loaded)
    assert tokens_of(*loaded, sampler=mlx_lm_sampler(temp=0.0)) == greedy
    drawn = tokens_of(*loaded, sampler=mlx_lm_sampler(temp=5.0))
    assert drawn != greedy
    theirs = mlx_lm_processors(repetition_penalty=2.0)
    penalised = tokens_of(*loaded, logits_processors=theirs)
    assert penalised != greedy
    ours = make_logits_processors(repetition_penalty=2.0)
    assert tokens_of(*loaded, logits_processors=ours) == penalised
    assert tokens_of(*loaded, sampler=mlx_lm_sampler(temp=0.0), logits_processors=theirs) == penalised


@pytest.mark.parametrize("name", ["one", "v1"])
def test_a_prompt_cache_goes_on_where_its_text_ends(bundle, name, tmp_path):
    model, tokenizer = load(bundle.path, name, settings=FLOAT32)
    cache, whole = make_prompt_cache(model), []
    for turn in ("first question", " and a second one", " and a third"):
        ids = tokenizer.encode(turn)
        whole += ids[1:] if whole and ids[0] == tokenizer.bos_id else ids
        said = tokens_of(model, tokenizer, turn, 9, prompt_cache=cache)
        assert said == tokens_of(model, tokenizer, list(whole), 9)
        whole += said
        assert cache.text == whole
    save_prompt_cache(tmp_path / "cache.safetensors", cache)
    again = load_prompt_cache(tmp_path / "cache.safetensors", model)
    assert again.text == whole
    later = " at last"
    assert tokens_of(model, tokenizer, later, 9, prompt_cache=again) == tokens_of(
        model, tokenizer, later, 9, prompt_cache=cache
    )


def test_a_cache_computes_only_what_is_new(loaded):
    model, tokenizer = loaded
    cache = make_prompt_cache(model)
    tokens_of(model, tokenizer, "a long beginning of a text", 8, prompt_cache=cache)
    before = len(cache.text)
    tokens_of(model, tokenizer, "b", 4, prompt_cache=cache)
    assert model.step_model.reused >= before - 1


def test_caches_of_other_models_are_refused(bundle, loaded, tmp_path):
    model, tokenizer = loaded
    shared, _ = load(bundle.path, "v1", settings=FLOAT32)
    with pytest.raises(UserError, match="another base, dtype or adapter than 'v1'"):
        tokens_of(shared, tokenizer, prompt_cache=make_prompt_cache(model))
    cache = make_prompt_cache(model)
    tokens_of(model, tokenizer, "text", 5, prompt_cache=cache)
    save_prompt_cache(tmp_path / "cache.safetensors", cache)
    with pytest.raises(UserError, match="another base, dtype or adapter"):
        load_prompt_cache(tmp_path / "cache.safetensors", shared)
    with pytest.raises(UserError, match="no such file"):
        load_prompt_cache(tmp_path / "nothing.safetensors", model)
    reference, _ = load(bundle.path, "one", settings=RuntimeSettings(backend="reference"))
    with pytest.raises(UserError, match="prompt caches are of MLX"):
        make_prompt_cache(reference)


def test_a_cache_of_a_base_folder_ends_with_its_weights(tmp_path, mlx_base):
    folder, file = tmp_path / "base", tmp_path / "cache.safetensors"
    shutil.copytree(mlx_base.path, folder)
    model, tokenizer = load(folder, settings=FLOAT32)
    cache = make_prompt_cache(model)
    tokens_of(model, tokenizer, "text", 5, prompt_cache=cache)
    save_prompt_cache(file, cache)
    assert load_prompt_cache(file, load(folder, settings=FLOAT32)[0]).text == cache.text
    (weights,) = folder.glob("*.safetensors")
    os.utime(weights, ns=(0, 0))  # another file took its place
    with pytest.raises(UserError, match="another base, dtype or adapter"):
        load_prompt_cache(file, load(folder, settings=FLOAT32)[0])


@pytest.mark.parametrize("pending", ["[true]", "[99999]", "7", "[[1]]", "[1e400]", "{"])
def test_pending_tokens_that_are_none(loaded, tmp_path, pending):
    model, tokenizer = loaded
    cache, file = make_prompt_cache(model), tmp_path / "cache.safetensors"
    tokens_of(model, tokenizer, "text", 5, prompt_cache=cache)
    save_prompt_cache(file, cache)
    arrays, about = mx.load(str(file), return_metadata=True)
    mx.save_safetensors(str(file), arrays, {**about, "pending": pending})
    with pytest.raises(UserError, match="cache.safetensors: its (pending tokens are not|text: token id)"):
        load_prompt_cache(file, model)


def test_adapters_share_the_base(bundle, loaded):
    model, tokenizer = loaded
    two = model.with_adapter("two")
    alone = load(bundle.path, "two", settings=FLOAT32)
    assert tokens_of(two, tokenizer) == tokens_of(*alone)
    assert two._family is model._family and set(two._family._bank.names) == {"one", "two"}
    assert model.with_adapter("two") is two and two.with_adapter("one") is model
    base = model.with_adapter(None)
    assert tokens_of(base, tokenizer) == tokens_of(model, tokenizer)  # lossless
    assert not any(r.from_draft for r in stream_generate(base, tokenizer, PROMPT, max_tokens=8))
    with pytest.raises(UserError, match="no adapter 'three'"):
        model.with_adapter("three")


def test_another_back_end(bundle, loaded):
    reference = load(bundle.path, "one", settings=RuntimeSettings(backend="reference", device="cpu"))
    responses = list(stream_generate(*reference, PROMPT, max_tokens=24))
    assert [r.token for r in responses] == tokens_of(*loaded)
    assert responses[-1].peak_memory > 0.01
    with pytest.raises(UserError, match="load it again"):
        reference[0].with_adapter("two")


def test_a_generation_may_be_left_and_is_not_mixed_with_another(loaded):
    wanted = tokens_of(*loaded)
    for response in stream_generate(*loaded, "something else", max_tokens=20):
        if response.generation_tokens == 3:
            break
    assert tokens_of(*loaded) == wanted
    first, second = (stream_generate(*loaded, text, max_tokens=20) for text in ("a text", "another"))
    next(first), next(second)
    with pytest.raises(RuntimeError, match="another generation was begun"):
        list(first)


def test_what_cannot_be_loaded(tmp_path, bundle, mlx_base):
    with pytest.raises(UserError, match="nowhere: no such base model folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="name one of its adapters: one, two, v1"):
        load(bundle.path)
    with pytest.raises(UserError, match="unknown back end 'metal'"):
        load(bundle.path, "one", settings=RuntimeSettings(backend="metal"))
    with pytest.raises(UserError, match="only back end 'mlx' loads a base folder"):
        load(mlx_base.path, settings=RuntimeSettings(backend="reference"))
    with pytest.raises(AttributeError, match="no attribute 'chat'"):
        _ = ss_runtime.chat


def test_chat_messages_become_a_prompt(loaded):
    _, tokenizer = loaded
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
    assert tokenizer.chat_template is None
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "hello\nthere"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert ids == tokenizer.encode("hello\nthere") and tokenizer.decode(ids) == "hello\nthere"


def test_verbose_prints_text_and_speed(loaded, capsys):
    text = generate(*loaded, PROMPT, max_tokens=6, verbose=True)
    printed = capsys.readouterr().out
    assert printed.startswith(text) and "tokens-per-sec" in printed and "Peak memory" in printed


def test_importing_the_package_loads_none_of_its_parts():
    code = "import sys, ss_runtime; print(*sorted(m for m in sys.modules if m.startswith(('ss_', 'mlx'))))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["ss_runtime"]
    assert set(ss_runtime.__all__) <= set(dir(ss_runtime))
