"""A bundle whose model is divided into packages: the commands work as with one."""

from __future__ import annotations

import json

import pytest

from ss_convert.command import main as ss_convert
from ss_device.adapter import save_adapter
from ss_device.base_model import open_base
from ss_device.bundle import open_bundle
from ss_device.config import SpeculativeConfig
from ss_device.trace import load_traces
from ss_runtime.commands.generate import main as ss_generate
from ss_runtime.commands.validate import main as ss_validate
from tests.commands.conftest import PROMPTS, SIZES
from tests.tiny_models import random_adapter

OTHER = SpeculativeConfig(num_streams=2, num_msa_layers=1)
PACKAGES = ("coreml/tiny-base-1-of-2.mlpackage", "coreml/tiny-base-2-of-2.mlpackage")


@pytest.fixture(scope="module")
def divided(models, tmp_path_factory):
    """Two parts, int8, pruned; a second adapter with another first MSA layer added to both packages."""
    folder = tmp_path_factory.mktemp("divided")
    output = folder / "bundle"
    more = (*SIZES, "--parts", "2", "--weights", "int8", "--keep", "6")
    source = ("--models", str(models))
    assert ss_convert(["--adapter", "tiny", *source, "--output", str(output), *more]) == 0
    base = open_base(models / "base" / "tiny-base")
    save_adapter(random_adapter(base, OTHER, seed=5, app="other"), base.architecture, folder / "other")
    (folder / "other" / "golden_prompts.jsonl").write_text(json.dumps({"prompt": PROMPTS[0]}) + "\n")
    assert ss_convert(["--adapter", str(folder / "other"), *source, "--into", str(output)]) == 0
    return output


def test_the_manifest_says_how_parts_chain(divided):
    bundle = open_bundle(divided, verify=True)
    assert bundle.manifest.made.package["parts"] == 2
    sizes = bundle.manifest.made.package_bytes
    assert len(sizes["parts"]) == 2 and sum(sizes["parts"]) == sizes["weight_bytes"]
    for entry in bundle.manifest.adapters.values():
        assert entry.coreml.packages == PACKAGES and entry.coreml.package == PACKAGES[0]
        first, last = entry.coreml.chain
        assert first.layers[0] == 0 and first.layers[1] == last.layers[0] and last.layers[1] == 3
        assert last.step["previous_hidden"] == "hidden" and "previous_hidden" not in first.step


@pytest.mark.parametrize("app", ["tiny", "other"])
def test_every_back_end_says_what_the_reference_said(divided, capsys, app):
    entry = open_bundle(divided).adapter(app)
    recorded = load_traces(divided / entry.coreml.golden)[0].generated
    capsys.readouterr()
    arguments = ["--bundle", str(divided), "--adapter", app, "--backend", "executor", "--dtype", "float32"]
    assert ss_generate([*arguments, "--json", "--prompt", PROMPTS[0]]) == 0
    assert tuple(json.loads(capsys.readouterr().out)["token_ids"]) == recorded
    arguments = [str(divided), "--adapter", app, "--backend", "executor", "--dtype", "float32", "--json"]
    assert ss_validate(arguments) == 0
    [result] = json.loads(capsys.readouterr().out)["results"]
    assert result["token_exact"] == result["prompts"] > 0


def test_the_audit_lists_the_parts(divided, capsys):
    assert ss_convert(["audit", str(divided), "--json"]) == 0
    packages = json.loads(capsys.readouterr().out)["packages"]
    assert tuple(package["package"] for package in packages) == PACKAGES
    layers = [set(p["functions"]["tiny_step"]["rows"]) - {"head"} for p in packages]
    assert not layers[0] & layers[1]


def test_a_number_of_parts_that_cannot_be_is_refused(refuses, models, divided, tmp_path):
    adapter = ("--adapter", "tiny", "--models", models)
    target = ("--output", tmp_path / "none", *SIZES)
    refuses(ss_convert, *adapter, *target, "--parts", 4, says=("--parts 4 exceeds the 3 layers",))
    refuses(ss_convert, *adapter, *target, "--parts", "few", says=("--parts", "few"))
    says = ("was made with --parts 2, not 3",)
    refuses(ss_convert, *adapter, "--into", divided, "--parts", 3, says=says)


def test_sizes_of_packages_stay_near_what_they_hold(models, tmp_path, capsys):
    base = open_base(models / "base" / "tiny-base")
    save_adapter(random_adapter(base, OTHER, seed=5, app="other"), base.architecture, tmp_path / "other")
    adapters = ("--adapter", "tiny", "--adapter", str(tmp_path / "other"))
    arguments = ("sizes", *adapters, "--models", str(models), "--weights", "int8", "--json")
    capsys.readouterr()
    assert ss_convert(list(arguments)) == 0
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert list(row["own"]) == ["tiny", "other"] and row["weights"] == "int8"
    one, two = row["merged"]
    sums = [row["base"] + row["own"]["tiny"], row["base"] + sum(row["own"].values())]
    # Beside a base this small 3 % have no room for the cosines and sines (float32) of all positions, the
    # masks of 32 nodes and their 3 or 2 streams, and for the padding of every constant to 64 bytes.
    rotary = 4 * (base.architecture.max_positions + 32 + 8) * base.architecture.head_dim
    masks = [2 * 32 * 32 * (1 + streams) * streams for streams in (3, 2)]
    fixed = rotary + 2 * 2 * 32 * 32 + 10_000
    assert sums[0] < one <= 1.03 * sums[0] + fixed + masks[0]
    assert sums[1] < two <= 1.03 * sums[1] + fixed + sum(masks)
    assert row["own"]["other"] < two - one <= 1.03 * row["own"]["other"] + masks[1] + 6_000
    # The description of an adapter's two functions is the same for a base of any size with three layers.
    descriptions = [p - w for p, w in zip(row["packages"], row["merged"], strict=True)]
    assert 0 < descriptions[0] < 110_000 and descriptions[1] < 2 * 110_000
    assert row["packages_over"] == [
        pytest.approx(p / t - 1, abs=1e-4) for p, t in zip(row["packages"], sums, strict=True)
    ]
