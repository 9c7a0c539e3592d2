"""Adapters side by side over one base: every answer is that of a fresh load; caches are reused."""

from __future__ import annotations

import gc
import shutil
from weakref import ref

import mlx.core as mx
import numpy as np
import pytest

from ss_device.decoding import Drafter, decode
from ss_device.errors import UserError
from ss_device.prompt_lookup import PromptLookup
from ss_runtime.mlx.adapter_bank import AdapterBank
from ss_runtime.mlx.loading import load_model
from ss_runtime.reused_text import cache_content
from ss_runtime.settings import RuntimeSettings
from tests.runtime.bundles import make_bundle
from tests.runtime.mlx_cases import CONFIGS, PROMPT, SHARED, mlx_model
from tests.tiny_models import make_tiny_base, random_adapter

CONFIG_OF = {"one": CONFIGS["paper"], "two": CONFIGS["rich"], "v1": SHARED[False], "v2": SHARED[True]}


@pytest.fixture(scope="module")
def bundle(mlx_base, tmp_path_factory):
    """Two lossless and two shared adapters over one base."""
    return make_bundle(tmp_path_factory.mktemp("bank") / "bundle", mlx_base, CONFIG_OF)


@pytest.fixture
def bank(bundle):
    return AdapterBank(bundle, RuntimeSettings(dtype="float32"))


def answer(model, bias, prompt, count=10):
    steps = decode(model, Drafter(6, bigram_bias=bias), prompt, count)
    return [(tuple(s.tokens), s.num_drafted) for s in steps]


def test_interleaved_requests_equal_fresh_loads(bundle, bank):
    """Tokens and accepted drafts: a stale weight or cache would change one of them."""
    rng = np.random.default_rng(0)
    prompts = [PROMPT, PROMPT[:7] + [9, 8], [1, 77, 78]]
    fresh = {}
    for name, adapter in bundle.manifest.adapters.items():
        model = load_model(bundle, adapter, RuntimeSettings(dtype="float32"))
        for number, prompt in enumerate(prompts):
            fresh[name, number] = answer(model, bundle.bigram_bias(adapter), prompt)
    reused = 0
    for _ in range(24):
        name, number = rng.choice(list(CONFIG_OF)), int(rng.integers(len(prompts)))
        resident = bank.activate(name)
        assert answer(resident.model, resident.bigram_bias, prompts[number]) == fresh[name, number]
        reused += resident.model.reused
    assert reused > 30


def test_base_weights_are_held_once(bundle):
    mx.clear_cache()
    before = mx.get_active_memory()
    bank = AdapterBank(bundle, RuntimeSettings(dtype="float32"))
    held = mx.get_active_memory() - before
    arrays = sum(bank.memory().values()) + bank.base_bytes
    assert held < arrays + bank.base_bytes / 2
    assert all(size > 0 for size in bank.memory().values())


def test_lossless_adapters_share_a_cache_and_shared_ones_do_not(bank):
    texts = {name: bank.activate(name).model.text for name in CONFIG_OF}
    assert texts["one"] is texts["two"]
    assert len({id(text) for text in texts.values()}) == 3
    answer(bank.activate("one").model, None, PROMPT)
    two = bank.activate("two")
    answer(two.model, two.bigram_bias, PROMPT)
    assert two.model.reused == len(PROMPT) - 1


def test_a_conversation_goes_on_from_what_was_generated(bank):
    for name, generated_counts in (("one", True), ("v1", True), ("v2", False)):
        model = bank.activate(name).model
        text = [t for s in decode(model, Drafter(6), PROMPT, 8) for t in s.tokens]
        answer(model, None, [*PROMPT, *text, 50, 51])
        # The newest token's keys and values are never computed; under v2 nothing generated is reused.
        assert model.reused == (len(PROMPT) + len(text) - 1 if generated_counts else len(PROMPT) - 1)


def test_load_and_unload_while_running(bundle):
    bank = AdapterBank(bundle, RuntimeSettings(dtype="float32"), ["one"])
    assert bank.activate().adapter.app == "one"
    bank.load("v1")
    assert bank.names == ["one", "v1"]
    with pytest.raises(UserError, match="name one of the loaded adapters: one, v1"):
        bank.activate()
    bank.unload("one")
    with pytest.raises(UserError, match="no adapter 'one' is loaded"):
        bank.activate("one")
    with pytest.raises(UserError, match="no adapter 'three'"):
        bank.load("three")
    assert answer(bank.load("one").model, None, PROMPT)


def test_unloading_frees_memory_at_once(bundle):
    """Live arrays are what they were, without a collection of garbage."""
    bank = AdapterBank(bundle, RuntimeSettings(dtype="float32"), ["one"])
    gc.collect()
    gc.disable()
    try:
        before = mx.get_active_memory()
        answer(bank.load("v1").model, None, PROMPT)
        assert mx.get_active_memory() > before + bank.memory()["v1"] / 2
        bank.unload("v1")
        assert mx.get_active_memory() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("rows", ["kept", "accepted"])
def test_a_compiled_model_is_freed_at_once(mlx_base, rows):
    gc.collect()
    gc.disable()
    try:
        before = mx.get_active_memory()
        adapter = random_adapter(mlx_base, CONFIGS["rich"])
        model = mlx_model(mlx_base, adapter, stream_rows=rows, compiled=True)
        gone = ref(model)
        answer(model, None, PROMPT)
        mx.eval(model.decoder.parameters())
        held = mx.get_active_memory() - before
        del model
        assert gone() is None
        assert mx.get_active_memory() - before < held / 10
    finally:
        gc.enable()


def test_the_base_alone(bundle, bank, hugging_face):
    """Plain and with prompt lookup: Hugging Face's greedy text; it shares the lossless adapters' cache."""
    import torch

    base = bank.activate(bank.base_name)
    wanted = hugging_face.generate(
        torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    wanted = wanted[0, len(PROMPT) :].tolist()
    lookup = Drafter(6, lookup=PromptLookup(), use_streams=False)
    for drafter in (Drafter(1), lookup):
        steps = decode(base.model, drafter, PROMPT, 12)
        assert [t for s in steps for t in s.tokens] == wanted
    assert base.num_bytes == 0 and bank.base_name not in bank.names
    assert base.model.text is bank.activate("one").model.text
    with pytest.raises(UserError, match="is the base"):
        bank.unload(bank.base_name)


def test_an_adapter_that_the_bundle_got_later(mlx_base, tmp_path):
    """As after `ss-convert --into`; another base under the same path is refused."""
    folder = tmp_path / "bundle"
    bank = AdapterBank(
        make_bundle(folder, mlx_base, {"one": CONFIGS["paper"]}), RuntimeSettings(dtype="float32")
    )
    shutil.rmtree(folder)
    make_bundle(folder, mlx_base, {"one": CONFIGS["paper"], "two": CONFIGS["rich"]})
    assert bank.load("two").adapter.app == "two" and bank.names == ["one", "two"]
    shutil.rmtree(folder)
    other = make_tiny_base(tmp_path / "other", seed=5)
    make_bundle(folder, other, {"three": CONFIGS["paper"]})
    with pytest.raises(UserError, match="has another base now"):
        bank.load("three")
    assert answer(bank.activate("two").model, None, PROMPT)


@pytest.mark.parametrize("name", ["one", "two", "v1", "v2"])
def test_cancelling_leaves_the_cache_usable(bundle, bank, name):
    """Between steps, inside a step and inside a prefill; what follows is a fresh load's answer."""
    resident, drafter = bank.activate(name), Drafter(6)
    prompts = [PROMPT, [*PROMPT, 9, 8, 7], [1, 77, 78, 79]]
    model = load_model(bundle, bundle.adapter(name), RuntimeSettings(dtype="float32"))
    fresh = [[(s.tokens, s.num_drafted) for s in decode(model, drafter, p, 9)] for p in prompts]

    def check():
        for prompt, wanted in zip(prompts, fresh, strict=True):
            steps = decode(resident.model, drafter, prompt, 9)
            assert [(s.tokens, s.num_drafted) for s in steps] == wanted

    for count in (1, 2, 4):
        steps = decode(resident.model, drafter, prompts[0], 30)
        for _ in range(count):
            next(steps)
        steps.close()
        assert resident.model.text.kv.length == len(resident.model.text.tokens)
        check()
    inner = resident.model._model
    for part in ("head_logits", "embed_rows"):
        steps = decode(resident.model, drafter, prompts[2], 30)
        if part == "head_logits":
            next(steps)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(inner.decoder, part, _interrupt)
            next(steps)
        check()


def _interrupt(*arguments):
    raise KeyboardInterrupt


def test_saved_cache_is_taken_up_again(bundle, bank, tmp_path):
    one = bank.activate("one")
    expected = answer(one.model, None, PROMPT)
    one.model.text.save(tmp_path / "cache.safetensors")
    other = AdapterBank(bundle, RuntimeSettings(dtype="float32"), ["two", "one"]).activate("one").model
    other.text.load(tmp_path / "cache.safetensors", context=100)
    assert answer(other, None, PROMPT) == expected
    assert other.reused == len(PROMPT) - 1
    other.text.trim(4)
    assert answer(other, None, PROMPT) == expected and other.reused == 4


def test_bad_caches_are_refused(bundle, bank, tmp_path):
    text = bank.activate("one").model.text
    with pytest.raises(UserError, match="empty"):
        text.save(tmp_path / "nothing.safetensors")
    answer(bank.activate("one").model, None, PROMPT)
    file = tmp_path / "cache.safetensors"
    text.save(file)
    with pytest.raises(UserError, match="another base, dtype or adapter"):
        bank.activate("v1").model.text.load(file, 100)
    contents = {
        cache_content(bundle, bundle.adapter("one"), RuntimeSettings(dtype="float32", quantize=q))
        for q in (None, "4", "8")
    }
    assert len(contents) == 3 and text.content in contents
    with pytest.raises(UserError, match="the context holds 3"):
        text.load(file, 3)
    with pytest.raises(UserError, match="cannot be trimmed"):
        text.trim(1000)
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(UserError, match="not a readable safetensors"):
        text.load(file, 100)
    with pytest.raises(UserError, match="no such file"):
        text.load(tmp_path / "none", 100)
    with pytest.raises(UserError, match="does not compute in int7"):
        AdapterBank(bundle, RuntimeSettings(dtype="int7"))
