"""Options of ss-convert that could be taken without any effect are refused by name."""

from __future__ import annotations

import json

import pytest

from ss_convert.command import _parser
from ss_convert.command import main as ss_convert
from ss_convert.planning import plan_conversion
from ss_convert.settings import ConversionSettings
from ss_device.adapter import save_adapter
from ss_device.base_model import open_base
from ss_device.config import SpeculativeConfig
from ss_executor import load_package
from ss_runtime.commands.generate import main as ss_generate
from tests.tiny_models import random_adapter

MLX = ("--target", "mlx")


@pytest.fixture
def pruning_models(models, tmp_path):
    """The tiny base, and an adapter with a pruning head."""
    base = open_base(models / "base" / "tiny-base")
    config = SpeculativeConfig(num_streams=2, num_msa_layers=1, pruning_rank=2)
    save_adapter(random_adapter(base, config, app="pruned"), base.architecture, tmp_path / "pruned")
    return models, str(tmp_path / "pruned")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((*MLX, "--weights", "lut4"), "--weights is for Core ML packages"),
        ((*MLX, "--embedding-weights", "int8"), "--embedding-weights is for Core ML packages"),
        ((*MLX, "--preset", "ane"), "--preset is for Core ML packages"),
        ((*MLX, "--parts", "2"), "--parts is for Core ML packages"),
        ((*MLX, "--layout", "conv"), "--layout is for Core ML packages"),
        ((*MLX, "--no-pad-state"), "--pad-state is for Core ML packages"),
        ((*MLX, "--sampling"), "--sampling is for Core ML packages"),
        (("--target", "mlxfn", "--lora", "inputs"), "--lora is for Core ML packages"),
        ((*MLX, "--keep", "6"), "--keep is for Core ML packages, Core AI assets and exported"),
        ((*MLX, "--prune-in-graph"), "--prune-in-graph is for Core ML packages, Core AI assets"),
        (("--prune-over", "vocabulary"), "--prune-over is for early-exit pruning; add --keep"),
        (("--keep", "32", "--prune-over", "draft"), "--prune-over is for early-exit pruning"),
        (("--mlxfn-dtype", "float32"), "--mlxfn-dtype is for --target mlxfn or all"),
        (("--keep", "32", "--prune-in-graph"), "--prune-in-graph needs a --keep below the 32 nodes"),
        (("--keep", "6", "--no-prune-in-graph"), "--no-prune-in-graph keeps every node; leave --keep out"),
    ],
)
def test_what_would_change_nothing_is_refused(refuses, pruning_models, tmp_path, options, says):
    models, adapter = pruning_models
    output = tmp_path / "out"
    common = ("--adapter", adapter, "--models", models, "--output", output)
    refuses(ss_convert, *common, *options, says=(says,))
    assert not output.exists()


def kept(models, adapter, **changes) -> int:
    settings = ConversionSettings(adapters=(adapter,), models=models, golden=False, **changes)
    plan = plan_conversion(settings)
    return plan.adapters[0].options.num_kept


def test_pruning_in_the_graph_keeps_half_unless_told(pruning_models):
    models, adapter = pruning_models
    assert kept(models, adapter) == 32
    assert kept(models, adapter, prune_in_graph=True) == 16
    assert kept(models, adapter, prune_in_graph=True, num_nodes=9) == 4
    assert kept(models, adapter, prune_in_graph=True, num_kept=5) == 5
    assert kept(models, adapter, num_kept=5) == 5
    assert kept(models, adapter, prune_in_graph=False) == 32


def test_pruning_in_the_graph_needs_a_pruning_head(refuses, models, tmp_path):
    base = open_base(models / "base" / "tiny-base")
    config = SpeculativeConfig(num_streams=2, num_msa_layers=1, pruning_rank=0)
    save_adapter(random_adapter(base, config, app="whole"), base.architecture, tmp_path / "whole")
    arguments = ("--adapter", tmp_path / "whole", "--models", models, "--output", tmp_path / "out")
    says = ("adapter 'whole' has no pruning head, which pruning (--keep) needs",)
    refuses(ss_convert, *arguments, "--prune-in-graph", says=says)


def test_help_names_the_defaults_of_the_graph():
    text = " ".join(_parser().format_help().split())
    for says in (
        "products as linear or as 1×1 convolution (default linear; conv with ane, linear with gpu)",
        "fused operation (default explicit; explicit with ane, fused with gpu)",
        "to their slots (default one-hot; one-hot with ane, gather with gpu)",
        "0: all (default 0; 16384 with ane, 0 with gpu)",
        "multiple of 32 (default off; on with ane, off with gpu)",
    ):
        assert says in text, says


@pytest.fixture(scope="module")
def preset(models, tmp_path_factory):
    """A package with a preset, one of its choices changed, whose host chooses the tokens."""
    output = tmp_path_factory.mktemp("preset") / "out"
    options = ("--preset", "gpu", "--commit", "one-hot", "--sampling", "--target", "coreml", "--no-golden")
    sizes = ("--nodes", "6", "--context", "48", "--output", str(output))
    assert ss_convert(["--adapter", "tiny", "--models", str(models), *options, *sizes]) == 0
    return output


def test_a_package_with_sampling_draws_the_same_text_with_drafts_and_without(preset, capsys):
    command = ["--bundle", str(preset), "--backend", "executor", "--dtype", "float32", "--json"]
    command += ["--prompt", "SELECT a", "--max-tokens", "12", "--temp", "1.3"]
    texts = {}
    for seed in ("3", "4"):
        for more in ((), ("--plain",)):
            capsys.readouterr()
            assert ss_generate([*command, "--seed", seed, *more]) == 0
            texts[seed, more] = json.loads(capsys.readouterr().out)["token_ids"]
    assert texts["3", ()] == texts["3", ("--plain",)] and len(texts["3", ()]) > 1
    assert texts["4", ()] == texts["4", ("--plain",)] != texts["3", ()]


def test_the_preset_stands_in_manifest_and_package(preset):
    output = preset
    manifest = json.loads((output / "manifest.json").read_text())
    for said in (manifest["made"]["package"], manifest["adapters"]["tiny"]["coreml"]["graph"]):
        assert (said["preset"], said["commit"], said["attention"]) == ("gpu", "one-hot", "fused")
    metadata = load_package(output / "coreml/tiny-base.mlpackage").metadata
    assert (metadata["preset"], metadata["attention"], metadata["lora"]) == ("gpu", "fused", "baked")
