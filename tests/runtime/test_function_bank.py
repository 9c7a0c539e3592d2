"""Adapters side by side over a bundle's functions: answers of fresh loads, one asset, common beginnings."""

from __future__ import annotations

import gc
import shutil

import numpy as np
import pytest

from ss_device.decoding import Drafter, decode
from ss_device.errors import UserError
from ss_runtime.backends import open_backend
from ss_runtime.function_bank import FunctionBank
from ss_runtime.settings import RuntimeSettings, functions_of
from tests.runtime.bundles import FUNCTION_BACKENDS, convert_bundle
from tests.runtime.mlx_cases import CONFIGS, PROMPT, SHARED
from tests.runtime.test_coreml_model import make_model


def answer(model, bias, prompt, count=10):
    steps = decode(model, Drafter(6, bigram_bias=bias), prompt, count)
    return [(tuple(s.tokens), s.num_drafted) for s in steps]


@pytest.fixture(params=FUNCTION_BACKENDS)
def settings(request):
    return RuntimeSettings(request.param, "float32")


@pytest.fixture
def bank(function_bundle, settings):
    return FunctionBank(function_bundle, settings)


def test_interleaved_requests_equal_fresh_loads(function_bundle, settings, bank):
    """Tokens and accepted drafts, with common beginnings that are taken from the text before."""
    rng = np.random.default_rng(0)
    prompts = [PROMPT, PROMPT[:7] + [9, 8], [*PROMPT, *range(60, 80)], [1, 77, 78]]
    fresh = {}
    for name, adapter in function_bundle.manifest.adapters.items():
        model = open_backend(function_bundle, adapter, settings)
        for number, prompt in enumerate(prompts):
            fresh[name, number] = answer(model, function_bundle.bigram_bias(adapter), prompt)
    reused = 0
    for _ in range(24):
        name, number = rng.choice(list(bank.names)), int(rng.integers(len(prompts)))
        resident = bank.activate(name)
        assert answer(resident.model, resident.bigram_bias, prompts[number]) == fresh[name, number]
        reused += resident.model.reused
    assert reused > 30


def test_lossless_adapters_share_a_text_and_a_conversation_goes_on(bank):
    """All but what the last commit kept, which is still in scratch rows; under v2 the prompt alone."""
    texts = {name: bank.activate(name).model.text for name in bank.names}
    assert texts["one"] is texts["two"] and len({id(text) for text in texts.values()}) == 3
    answer(bank.activate("one").model, None, PROMPT)
    answer(bank.activate("two").model, None, PROMPT)
    assert bank.activate("two").model.reused == len(PROMPT) - 1
    for name in ("one", "v1", "v2"):
        model = bank.activate(name).model
        steps = list(decode(model, Drafter(6), PROMPT, 12))
        text = [token for step in steps for token in step.tokens]
        answer(model, None, [*PROMPT, *text, 50, 51])
        committed = len(PROMPT) + sum(len(step.path) for step in steps[1:-1])
        assert model.reused == (len(PROMPT) - 1 if name == "v2" else committed) > 1


def test_names_and_bytes(function_bundle, bank):
    assert bank.models == bank.names == ["one", "two", "v1", "v2"]
    with pytest.raises(UserError, match="no adapter 'tiny-base' is loaded"):
        bank.activate(bank.base_name)
    package = functions_of(bank.settings.backend, function_bundle.adapter("one")).package
    files = [path for path in (function_bundle.path / package).rglob("*") if path.is_file()]
    assert bank.base_bytes == sum(path.stat().st_size for path in files) > 0
    bias = bank.activate("two").bigram_bias
    assert bank.memory() == {"one": 0, "two": bias.u.nbytes + bias.v.nbytes, "v1": 0, "v2": 0}
    bank.unload("one")
    assert len(bank.prompt_caches()) == 3
    bank.unload("two")
    assert len(bank.prompt_caches()) == 2 and bank.names == ["v1", "v2"]
    assert bank.load("one").adapter.app == "one"


def test_an_interrupted_call_leaves_nothing_to_reuse():
    """Nobody knows how far it came; what came before is computed again."""
    model, prefill, step = make_model()
    model.prefill([1, 2, 3, 4, 5, 6, 7])
    assert (model.cache.length, model.cache.available) == (7, 6)
    model.prefill([1, 2, 3, 4, 5, 9, 8], reuse=5)
    assert prefill.calls[-1]["position"].tolist() == [5]
    assert prefill.calls[-1]["tokens"].tolist() == [[9] * 4]
    assert step.calls[-1]["positions"].tolist()[0] == 6
    assert step.calls[-1]["commit_nodes"].tolist() == [-1] * 5
    assert (model.cache.length, model.cache.available) == (7, 6)

    def interrupt(inputs, state):
        raise KeyboardInterrupt

    step.predict = interrupt
    with pytest.raises(KeyboardInterrupt):
        model.prefill([1, 2, 3, 4, 5, 9, 8], reuse=5)
    assert model.cache.available == 0


def test_adapters_as_inputs_share_their_functions(half_base, tmp_path, settings):
    """The host holds what differs between them, and passes it with every call."""
    configs = {"a": SHARED[False], "b": SHARED[False]}
    target = "coreai" if settings.backend == "coreai" else "coreml"
    bundle = convert_bundle(
        tmp_path / "bundle", half_base, configs, "--target", f"mlx,{target}", "--lora", "inputs"
    )
    bank = FunctionBank(bundle, settings)
    assert min(bank.memory().values()) > 0
    answers = {}
    for name in ("a", "b", "a"):
        found = answer(bank.activate(name).model, None, PROMPT)
        assert answers.setdefault(name, found) == found
        model = open_backend(bundle, bundle.adapter(name), RuntimeSettings("mlx", "float32"))
        assert found == answer(model, None, PROMPT)
    assert answers["a"] != answers["b"]


@pytest.mark.parametrize("form", [("--coreai-cache", "inputs"), ("--parts", "2")], ids=["inputs", "parts"])
def test_assets_of_other_forms_reuse_as_well(half_base, tmp_path, form):
    """Keys and values that the host keeps, and a state per part."""
    pytest.importorskip("coreai", reason="coreai-core is not installed")
    configs, settings = {"a": CONFIGS["paper"], "b": CONFIGS["rich"]}, RuntimeSettings("coreai", "float32")
    bundle = convert_bundle(tmp_path / "bundle", half_base, configs, "--target", "mlx,coreai", *form)
    bank, longer, reused = FunctionBank(bundle, settings), [*PROMPT, *range(60, 80)], []
    for name, prompt in (("a", PROMPT), ("b", longer), ("a", longer), ("b", [*PROMPT, 7])):
        resident = bank.activate(name)
        fresh, bias = open_backend(bundle, resident.adapter, settings), resident.bigram_bias
        assert answer(resident.model, bias, prompt) == answer(fresh, bias, prompt)
        reused.append(resident.model.reused)
    assert reused == [0, len(PROMPT), len(longer) - 1, len(PROMPT)]


def test_what_cannot_run_is_one_line(function_bundle, half_base, tmp_path):
    bundle = convert_bundle(tmp_path / "bundle", half_base, {"a": CONFIGS["bare"]}, "--target", "mlx")
    with pytest.raises(UserError, match="back end 'executor': the bundle has no Core ML package"):
        FunctionBank(bundle, RuntimeSettings("executor"))
    for changes, says in (
        ({"kv_bits": 8}, "leave --kv-bits out"),
        ({"quantize": "4"}, "leave --quantize out"),
        ({"dtype": "bfloat16"}, "does not compute in bfloat16"),
        ({"compute_units": "cpu"}, "--compute-units is for"),
    ):
        with pytest.raises(UserError, match=says):
            FunctionBank(function_bundle, RuntimeSettings("executor", **changes))


class TestOneAsset:
    """Of a path and a dtype a process opens one, and lets it go with the last model."""

    @pytest.fixture
    def opened(self, monkeypatch):
        pytest.importorskip("coreai", reason="coreai-core is not installed")
        from ss_runtime.coreai.asset import OpenAsset

        gc.collect()
        opened, begin = [], OpenAsset.__init__

        def counted(self, *arguments):
            opened.append(arguments)
            begin(self, *arguments)

        monkeypatch.setattr(OpenAsset, "__init__", counted)
        return opened

    def test_all_adapters_and_models_run_on_it(self, function_bundle, opened):
        bank = FunctionBank(function_bundle, RuntimeSettings("coreai", "float32"))
        other = open_backend(function_bundle, bank.activate("two").adapter, bank.settings)
        assert len(opened) == 1
        half = open_backend(function_bundle, bank.activate("two").adapter, RuntimeSettings("coreai"))
        assert [arguments[1] for arguments in opened] == ["float32", "float16"]
        assert answer(other, None, PROMPT) == answer(bank.activate("two").model, None, PROMPT)
        assert half.limits == other.limits
        del bank, other, half
        gc.collect()
        FunctionBank(function_bundle, RuntimeSettings("coreai", "float32"), ["one"])
        assert len(opened) == 3

    def test_an_asset_that_took_its_place_is_another(self, half_base, tmp_path, opened):
        """As after `ss-convert --into`: a loaded adapter keeps its own, a new one is in the new asset."""
        folder, settings = tmp_path / "bundle", RuntimeSettings("coreai", "float32")
        configs = {"a": CONFIGS["paper"], "b": CONFIGS["bare"]}
        first = convert_bundle(folder, half_base, {"a": configs["a"]}, "--target", "mlx,coreai")
        bank = FunctionBank(first, settings)
        before = answer(bank.activate("a").model, None, PROMPT)
        shutil.rmtree(folder)
        both = convert_bundle(folder, half_base, configs, "--target", "mlx,coreai")
        assert answer(bank.load("b").model, None, PROMPT)
        assert sum(path.is_relative_to(folder) for path, *_ in opened) == 2  # not those of the conversions
        assert answer(bank.activate("a").model, None, PROMPT) == before
        asset = both.adapter("a").coreai.package
        damaged = folder / next(name for name in both.manifest.files if name.startswith(f"{asset}/"))
        damaged.write_bytes(damaged.read_bytes()[::-1])
        del bank
        gc.collect()
        with pytest.raises(UserError, match="was changed after the conversion"):
            FunctionBank(both, settings)
