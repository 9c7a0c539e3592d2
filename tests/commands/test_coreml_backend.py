"""The Core ML back end over a stand-in of coremltools' `MLModel` that runs the reference executor."""

from __future__ import annotations

import sys
import warnings

import coremltools as ct
import pytest

from ss_convert.command import main as ss_convert
from ss_device.base_model import open_base
from ss_device.bundle import open_bundle
from ss_device.config import SpeculativeConfig
from ss_device.decoding import Drafter, decode
from ss_device.errors import UserError
from ss_executor import load_package
from ss_runtime.commands.generate import main as ss_generate
from ss_runtime.commands.validate import main as ss_validate
from ss_runtime.coreml.engines import COMPUTE_UNITS, open_coreml_model, open_executor_model
from tests.commands.conftest import PROMPTS, SIZES, save_with_lora
from tests.tiny_models import random_adapter

SHARED = SpeculativeConfig(
    mode="shared", num_streams=2, num_msa_layers=2, stream_mlp="base", stream_adapter_rank=0,
    lora_rank=2, lora_alpha=3.0,
)  # fmt: skip
FORMS = {"one package": (), "parts": ("--parts", "2"), "inputs": ("--lora", "inputs")}
PROMPT = [5, 9, 200, 31, 7, 9, 200]


class StandIn:
    """`MLModel` as documented: one function of a package, made for an engine; it may fail at a call."""

    made: list[tuple[str, str, ct.ComputeUnit]] = []
    fails_at: str | None = None

    def __init__(self, model, compute_units=ct.ComputeUnit.ALL, function_name=None):
        StandIn.made.append((model, function_name, compute_units))
        if StandIn.fails_at == "load":
            warnings.warn(
                "You will not be able to run predict() on this Core ML model. Underlying exception message "
                "was: Error compiling model:\n no such engine",
                RuntimeWarning,
                stacklevel=2,
            )
        self._program = load_package(model).program(function_name, "float16")

    def make_state(self):
        if StandIn.fails_at == "make_state":
            raise Exception("State functionality is only supported on macOS 15+")
        return self._program.make_state()

    def predict(self, data, state=None):
        if StandIn.fails_at == "predict":
            raise Exception("Unable to load CoreML.framework.\nCannot make predictions.")
        return self._program.predict(data, state)


@pytest.fixture
def mac(monkeypatch):
    """A machine that says it is a Mac, with the stand-in for Core ML."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ct.models, "MLModel", StandIn)
    monkeypatch.setattr(StandIn, "made", [])
    return StandIn


@pytest.fixture(scope="module", params=FORMS)
def converted(request, models, bundle, tmp_path_factory):
    """A bundle of each form; adapters as inputs need the shared mode."""
    if request.param == "one package":
        return bundle
    folder, adapter = tmp_path_factory.mktemp("form"), "tiny"
    if request.param == "inputs":
        base = open_base(models / "base" / "tiny-base")
        save_with_lora(random_adapter(base, SHARED, 1, "shared"), base, folder / "shared")
        adapter = str(folder / "shared")
    target = ("--output", str(folder / "bundle"), "--target", "coreml", "--no-golden")
    form = (*SIZES, *FORMS[request.param])
    assert ss_convert(["--adapter", adapter, "--models", str(models), *target, *form]) == 0
    return folder / "bundle"


def text(model) -> list[list[int]]:
    """Token ids of every step of one generation."""
    drafter = Drafter(model.limits.num_nodes)
    return [step.tokens for step in decode(model, drafter, PROMPT, 24, frozenset())]


def test_the_text_is_that_of_the_executor(mac, converted):
    opened = open_bundle(converted)
    entry = opened.adapter()
    ours = open_coreml_model(opened, entry, "ane")
    theirs = open_executor_model(opened, entry, "float16")
    assert text(ours) == text(theirs)
    names = {(str(opened.path / p), f) for p in entry.coreml.packages
             for f in (entry.coreml.prefill, entry.coreml.step)}  # fmt: skip
    assert {(path, function) for path, function, _ in mac.made} == names
    assert {units for *_, units in mac.made} == {ct.ComputeUnit.CPU_AND_NE}


def test_compute_units_are_those_of_coremltools():
    assert {ct.ComputeUnit[name] for name in COMPUTE_UNITS.values()} == set(ct.ComputeUnit)


@pytest.mark.parametrize(
    ("fails_at", "says"),
    [
        ("load", "cannot load 'tiny_prefill': You will not .* Error compiling model: no such engine"),
        ("make_state", "cannot make a state for 'tiny_step': State functionality .* macOS 15"),
        ("predict", "cannot run 'tiny_prefill': Unable to load CoreML.framework. Cannot make"),
    ],
)
def test_what_core_ml_refuses_is_one_line(mac, monkeypatch, bundle, fails_at, says):
    monkeypatch.setattr(StandIn, "fails_at", fails_at)
    opened = open_bundle(bundle)
    with pytest.raises(UserError, match=says) as raised:
        open_coreml_model(opened, opened.adapter()).prefill(PROMPT)
    assert "\n" not in str(raised.value)


def test_the_commands_choose_the_engines(mac, bundle, refuses):
    options = ("--bundle", str(bundle), "--prompt", PROMPTS[0], "--max-tokens", "4", "--json")
    assert ss_generate([*options, "--backend", "coreml", "--compute-units", "gpu"]) == 0
    assert {units for *_, units in mac.made} == {ct.ComputeUnit.CPU_AND_GPU}
    validate = [str(bundle), "--limit", "1", "--json", "--backend", "coreml"]
    assert ss_validate([*validate, "--compute-units", "cpu"]) == 0
    assert {units for *_, units in mac.made[2:]} == {ct.ComputeUnit.CPU_ONLY}
    says = ("--compute-units is for back ends 'coreml'", "executor")
    refuses(ss_generate, *options, "--backend", "executor", "--compute-units", "gpu", says=says)
    says = ("--compute-units is for --backend coreml",)
    refuses(ss_validate, bundle, "--backend", "executor", "--compute-units", "gpu", says=says)
