"""ss-validate where there is nothing to compare, or where traces are not this bundle's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ss_convert.command import main as ss_convert
from ss_device.adapter import save_adapter
from ss_device.base_model import open_base
from ss_device.config import SpeculativeConfig
from ss_device.trace import Trace, load_traces, save_traces
from ss_runtime.commands import validate
from ss_runtime.commands.validate import main as ss_validate
from tests.commands.conftest import rewrite_manifest
from tests.tiny_models import make_tiny_base, random_adapter

CONFIG = SpeculativeConfig(num_streams=2, num_msa_layers=1)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """A bundle (MLX) of two adapters of one shape, with golden traces."""
    models = tmp_path_factory.mktemp("models")
    base = make_tiny_base(models / "base/tiny-base", dtype="float16")
    for seed, app in enumerate(("one", "two")):
        folder = models / "adapters" / app
        save_adapter(random_adapter(base, CONFIG, seed=seed, app=app), base.architecture, folder)
        (folder / "golden_prompts.jsonl").write_text('{"prompt": "SELECT a"}\n')
    output = models / "out"
    sizes = ("--models", models, "--output", output, "--target", "mlx")
    adapters = ("--adapter", "one", "--adapter", "two")
    assert ss_convert([*map(str, (*adapters, *sizes))]) == 0
    return output


@pytest.fixture
def copied(two, tmp_path) -> Path:
    return Path(shutil.copytree(two, tmp_path / "copied"))


def results(capfd, *arguments) -> tuple[int, list[dict]]:
    capfd.readouterr()
    code = ss_validate([*map(str, arguments), "--json"])
    return code, json.loads(capfd.readouterr().out)["results"]


def test_traces_of_another_adapter_do_not_pass(copied, capfd):
    assert results(capfd, copied)[0] == 0
    for ending in ("json", "safetensors"):
        shutil.copy(copied / f"golden/two.{ending}", copied / f"golden/one.{ending}")
    rewrite_manifest(copied)
    code, found = results(capfd, copied)
    assert code == 1 and [f["passed"] for f in found] == [False, True]


def test_traces_without_prompts(copied, refuses):
    file = copied / "golden/one.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({**raw, "prompts": [], "steps": []}))
    rewrite_manifest(copied)
    refuses(ss_validate, copied, says=("golden/one.json", "no golden prompts"))


def test_a_prompt_that_ended_at_once_is_no_comparison(copied, capfd):
    first = load_traces(copied / "golden/one")[0]
    save_traces([Trace(first.text, first.prompt, first.generated[:1], 0.5, ())], copied / "golden/one")
    rewrite_manifest(copied)
    code, found = results(capfd, copied, "--adapter", "one")
    assert code == 1 and "nothing to go by" in found[0]["failures"][0]
    assert found[0]["max_logit_difference"] is None


def test_another_bos_or_tokenizer_than_the_traces(copied, refuses):
    file = copied / "manifest.json"
    file.write_text(file.read_text().replace('"bos_id": 1', '"bos_id": 0'))
    refuses(ss_validate, copied, says=("golden prompt 0 of 'one'", "another tokenizer's"))


def test_an_adapter_that_no_back_end_can_run(copied, refuses, monkeypatch):
    """One adapter that is compared does not make up for another that is not."""
    monkeypatch.setattr(
        validate, "why_not", lambda b, _, a: "not today" if a.app == "two" or b != "mlx" else None
    )
    says = ("adapter 'two': nothing can be compared here", "mlx:float32: not today")
    refuses(ss_validate, copied, says=says)


def test_a_bundle_without_adapters(copied, refuses):
    file = copied / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "adapters": {}}))
    refuses(ss_validate, copied, says=("no adapter in this bundle",))


def test_a_conversion_whose_golden_prompts_end_at_once(two, tmp_path, capfd):
    """A first token that is an end token leaves no steps: traces are written, and there is no replay."""
    models = Path(shutil.copytree(two.parent, tmp_path / "models"))
    folder = models / "base/tiny-base"
    config = json.loads((folder / "config.json").read_text())
    ends = {**config, "eos_token_id": list(range(config["vocab_size"]))}
    (folder / "config.json").write_text(json.dumps(ends))
    base = open_base(folder)
    adapter = random_adapter(base, CONFIG, app="one")
    save_adapter(adapter, base.architecture, models / "adapters/one")
    (models / "adapters/one/golden_prompts.jsonl").write_text('{"prompt": "SELECT a"}\n')
    output = tmp_path / "out"
    command = ("--adapter", "one", "--models", models, "--output", output, "--target", "mlx")
    assert ss_convert([*map(str, command)]) == 0
    assert results(capfd, output)[0] == 1
