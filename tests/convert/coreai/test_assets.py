"""Core AI assets on Apple's local runtime against the reference: what they can hold, how they are cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("coreai", reason="coreai-core is not installed")

import coreai.runtime
from coreai.authoring import AIModelAsset

from ss_convert.coreai.asset import write_asset
from ss_convert.coreai_options import coreai_options, large_state_notes
from ss_convert.graph import cache
from ss_convert.graph.description import describe
from ss_convert.graph.functions import adapter_functions
from ss_convert.graph.options import PRESETS, GraphOptions
from ss_device.adapter_inputs import input_values
from ss_device.config import SpeculativeConfig, paper_config
from ss_device.errors import UserError
from ss_device.reference.step_model import ReferenceStepModel
from ss_device.tree import tree_from_parents
from ss_runtime.coreai import asset
from ss_runtime.coreai.asset import OpenAsset
from ss_runtime.coreai.engines import AssetFunction, asset_engines
from ss_runtime.coreai.host_cache import HostCache, Kept
from ss_runtime.coreml.engines import COMPUTE_UNITS as ENGINES
from ss_runtime.function_step_model import FunctionStepModel
from tests.convert.cases import (
    CHUNK,
    CONTEXT,
    Pair,
    compare_steps,
    make_coreai,
    make_pair,
    open_assets,
    plain_text,
    prompt_ids,
    reference_model,
    write_coreai,
)
from tests.convert.coreml.test_lora_inputs import RANK, settings, tensors_of
from tests.convert.coreml.test_parts import CASES as PARTS
from tests.tiny_models import make_tiny_base, random_adapter

PLAIN = paper_config(num_msa_layers=2)
GATED = paper_config("shared", num_msa_layers=2, main_attends_streams=True, lora_rank=4, lora_alpha=8.0)
GIVEN = {
    "all nodes": (PLAIN, GraphOptions(8, 8, CONTEXT, CHUNK, cache="inputs")),
    "pruned": (PLAIN, GraphOptions(8, 5, CONTEXT, CHUNK, cache="inputs")),
    "gated, pruned, all layers MSA": (
        SpeculativeConfig(**{**GATED.to_dict(), "num_msa_layers": 3}),
        GraphOptions(8, 5, CONTEXT, CHUNK, cache="inputs"),
    ),
    "in parts": (PLAIN, GraphOptions(8, 5, CONTEXT, CHUNK, cache="inputs", cuts=(1, 2))),
    "ane": (PLAIN, GraphOptions(8, 5, CONTEXT, CHUNK, preset="ane", **PRESETS["ane"])),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_base(tmp_path_factory.mktemp("base") / "tiny", dtype="float16")


@pytest.mark.parametrize("case", GIVEN)
def test_a_cache_that_is_an_input_equals_the_reference(base, tmp_path, case):
    """The host writes new rows to their slots; after commits they are those of the reference."""
    config, options = GIVEN[case]
    pair = make_pair(base, config, options, tmp_path, "coreai")
    states = pair.model.state if options.cuts else [pair.model.state]
    assert all(isinstance(state, Kept) for state in states)
    depths = compare_steps(pair, prompt_ids(11), [8, 8, 8, 7, 8, 3, 1, 8])
    assert max(depths) >= 2 and min(depths) == 0


def test_a_host_that_commits_other_rows_is_caught(base, tmp_path, monkeypatch):
    """Rows by node where they should be rows among the kept ones: wrong above the pruning layer."""
    config, options = GIVEN["pruned"]
    pair = make_pair(base, config, options, tmp_path, "coreai")
    init = HostCache.__init__
    monkeypatch.setattr(
        HostCache, "__init__", lambda self, function, layers, first: init(self, function, layers, 99)
    )
    wrong = make_coreai(base, pair.adapter, options, tmp_path / "wrong" / "coreai" / "tiny")
    with pytest.raises(AssertionError):
        compare_steps(Pair(tmp_path, pair.adapter, wrong, pair.reference), prompt_ids(11), [8] * 6)


def test_a_graph_that_commits_other_rows_is_caught(base, tmp_path, monkeypatch):
    pair = make_pair(base, PLAIN, GraphOptions(8, 8, CONTEXT, CHUNK), tmp_path, "coreai")
    selected = cache._selected
    monkeypatch.setattr(cache, "_selected", lambda rows, indices: selected(rows, cache.op.sub(indices, 1)))
    options = GraphOptions(8, 8, CONTEXT, CHUNK)
    wrong = make_coreai(base, pair.adapter, options, tmp_path / "wrong" / "coreai" / "tiny")
    with pytest.raises(AssertionError):
        compare_steps(Pair(tmp_path, pair.adapter, wrong, pair.reference), prompt_ids(11), [8] * 6)


@pytest.mark.parametrize("case", PARTS)
def test_parts_equal_the_reference(tmp_path, case):
    config, kept, cuts, graph = PARTS[case]
    base = make_tiny_base(
        tmp_path / "base", dtype="float16", num_hidden_layers=4, head_dim=32, hidden_size=24
    )
    options = GraphOptions(6, kept, CONTEXT, CHUNK, cuts=cuts, **graph)
    pair = make_pair(base, config, options, tmp_path, "coreai")
    assert len(pair.model.functions.packages) == len(cuts) + 1
    assert max(compare_steps(pair, prompt_ids(11), [6] * 6)) >= 1


def test_two_adapters_in_one_asset_share_the_base(base, tmp_path):
    """Each is its own reference, and the second one costs its own weights and its graph alone."""
    adapters = [random_adapter(base, PLAIN, 1, "first"), random_adapter(base, PLAIN, 2, "second")]
    options = coreai_options(GraphOptions(8, 5, CONTEXT, CHUNK), None)
    sizes = []
    for count in (1, 2):
        path = tmp_path / str(count) / "coreai" / "both.aimodel"
        path.parent.mkdir(parents=True)
        functions = [
            function
            for adapter in adapters[:count]
            for function in adapter_functions(base.architecture, base.weights(), adapter, options)
        ]
        write_asset(functions, path, {})
        sizes.append(sum(file.stat().st_size for file in path.iterdir()))
    stored = sum(array.size * 2 for array in base.weights().values())
    assert sizes[1] - sizes[0] < sizes[0] - stored / 2
    assert set(AIModelAsset.load(path).summary().function_names) == {
        f"{app}_{kind}" for app in ("first", "second") for kind in ("prefill", "step")
    }
    for adapter in adapters:
        pair = opened(base, adapter, options, tmp_path / "2", "both.aimodel")
        compare_steps(pair, prompt_ids(11), [8, 8, 8])


def opened(base, adapter, options, bundle, name) -> Pair:
    """An adapter's functions of an asset `coreai/name`, beside the reference."""
    described = describe(adapter, base.architecture, options, [f"coreai/{name}"])
    model = open_assets(bundle, described, adapter.config, base.architecture)
    reference = ReferenceStepModel(
        reference_model(base, adapter), options.num_nodes, options.num_kept, CONTEXT, options.prune_over
    )
    return Pair(bundle, adapter, model, reference)


def test_functions_are_added_to_an_earlier_asset_and_replaced(base, tmp_path):
    first, second, newer = (
        random_adapter(base, PLAIN, seed, app) for seed, app in ((1, "first"), (2, "second"), (3, "first"))
    )
    options = coreai_options(GraphOptions(8, 5, CONTEXT, CHUNK), None)

    def functions(adapter):
        return adapter_functions(base.architecture, base.weights(), adapter, options)

    paths = [tmp_path / str(i) / "coreai" / "a.aimodel" for i in range(4)]
    for path in paths:
        path.parent.mkdir(parents=True)
    write_asset(functions(first), paths[0], {})
    kept = {"first_prefill", "first_step"}
    write_asset(functions(second), paths[1], {}, earlier=(paths[0], kept))
    others = {"second_prefill", "second_step"}
    write_asset(functions(newer), paths[2], {}, earlier=(paths[1], others))
    write_asset([*functions(first), *functions(second)], paths[3], {})
    sizes = [(path / "main.mlirb").stat().st_size for path in paths]
    assert sizes[1] < sizes[3] * 1.02, "the base's weights are stored once more"
    assert set(AIModelAsset.load(paths[2]).summary().function_names) == kept | others
    for folder, adapter in ((1, first), (1, second), (2, second), (2, newer)):
        pair = opened(base, adapter, options, tmp_path / str(folder), "a.aimodel")
        compare_steps(pair, prompt_ids(11), [8, 8, 8])


@pytest.mark.parametrize("kept", [6, 4])
def test_adapters_as_inputs_of_one_pair_of_functions(tmp_path, kept):
    base = make_tiny_base(tmp_path / "base", dtype="float16")
    adapters = [random_adapter(base, settings(4, 8.0), 0), random_adapter(base, settings(2, 6.0), 1)]
    options = GraphOptions(6, kept, CONTEXT, 8, lora="inputs", lora_rank=RANK)
    path = tmp_path / "coreai" / "tiny"
    functions = write_coreai(base, adapters[0], options, path)
    engines = asset_engines(tmp_path, functions, adapters[0].config, base.architecture, "float32")
    for adapter in adapters:
        values = input_values(tensors_of(adapter), adapter.config, base.architecture, RANK, options.prunes)
        model = FunctionStepModel(*engines, functions, adapter.config, base.architecture, values)
        reference = ReferenceStepModel(reference_model(base, adapter), 6, kept, CONTEXT, "draft")
        compare_steps(Pair(path, adapter, model, reference), prompt_ids(11), [6] * 4)


def test_the_same_inputs_make_the_same_bytes(base, tmp_path):
    adapter = random_adapter(base, PLAIN)
    for preset in ("none", "gpu", "ane"):
        found = []
        for turn in ("a", "b"):
            graph = PRESETS.get(preset, {})
            options = GraphOptions(8, 5, CONTEXT, CHUNK, preset=preset, **graph)
            write_coreai(base, adapter, options, tmp_path / preset / turn / "coreai" / "tiny")
            folder = tmp_path / preset / turn / "coreai" / "tiny.aimodel"
            found.append({file.name: file.read_bytes() for file in sorted(folder.iterdir())})
        assert found[0] == found[1]
        assert not any(str(tmp_path).encode() in content for content in found[0].values())


def test_the_neural_engine_preset_has_no_float32_anywhere(base, tmp_path):
    """Neither a constant nor a result, in the graph as it is written (lowering may add some of its own)."""
    adapter = random_adapter(base, PLAIN)
    text = {}
    for preset in ("gpu", "ane"):
        options = GraphOptions(8, 5, CONTEXT, CHUNK, preset=preset, **PRESETS[preset])
        write_coreai(base, adapter, options, tmp_path / preset / "coreai" / "tiny")
        text[preset] = str(AIModelAsset.load(tmp_path / preset / "coreai" / "tiny.aimodel").program)
    assert "xf32>" in text["gpu"]
    assert "xf16>" in text["ane"] and "f32" not in text["ane"]


def test_positions_beyond_2048_are_exact(tmp_path):
    """Of states so large wrong output was reported elsewhere; fp16 holds integers up to 2048 only."""
    base = make_tiny_base(tmp_path / "base", dtype="float16", max_position_embeddings=2304)
    options = GraphOptions(4, 4, 2200, 100)
    assert large_state_notes(coreai_options(options, None))
    assert not large_state_notes(coreai_options(options, "inputs"))
    pair = make_pair(base, PLAIN, options, tmp_path, "coreai")
    prompt = prompt_ids(2120)
    assert plain_text(pair.model, prompt, 4) == plain_text(pair.reference, prompt, 4)


def test_products_summed_in_float32_are_near_those_of_the_asset_as_it_is(base, tmp_path):
    """What the wheel's sake costs: its own sums are rounded term by term (test_operation_semantics.py)."""
    adapter = random_adapter(base, PLAIN)
    options = GraphOptions(4, 4, 24, 8)
    wide = make_coreai(base, adapter, options, tmp_path / "coreai" / "tiny", "float16")
    own = asset_engines(tmp_path, wide.functions, PLAIN, base.architecture, "unchanged")
    unchanged = FunctionStepModel(*own, wide.functions, PLAIN, base.architecture)
    tree = tree_from_parents([5, 6, 7, 8], [-1, 0, 0, 1])
    found = []
    for model in (wide, unchanged):
        proposal, verified = model.prefill(prompt_ids(7)), model.step(tree)
        found.append(np.concatenate([proposal.stream_logits, verified.stream_logits]))
    assert not np.array_equal(*found)
    np.testing.assert_allclose(*found, atol=0.15, rtol=0.01)


def test_compute_units_are_those_of_the_wheel_s_own_declarations():
    """The names exist on a Mac alone; its stub is in every wheel."""
    stub = Path(coreai.runtime.__file__).with_name("__init__.pyi").read_text()
    body = stub.partition("class ComputeUnitKind")[2].partition("\nclass ")[0]
    assert set(asset.COMPUTE_UNITS) == set(ENGINES)
    assert all(f"def {kind}(cls)" in body for kind in asset.COMPUTE_UNITS.values() if kind)


def test_a_function_that_is_not_there_and_an_input_of_a_wrong_shape(base, tmp_path):
    model = make_coreai(
        base, random_adapter(base, PLAIN), GraphOptions(4, 4, 24, 8), tmp_path / "coreai" / "tiny"
    )
    opened_asset = OpenAsset(tmp_path / "coreai" / "tiny.aimodel")
    with pytest.raises(UserError, match="has no function 'other_step'"):
        AssetFunction(opened_asset, "other_step")
    function = AssetFunction(opened_asset, model.functions.prefill)
    with pytest.raises(UserError, match="needs the input 'mask'"):
        function.predict({"tokens": np.zeros((1, 8), np.int32)}, function.make_state())
    inputs = {
        "tokens": np.zeros((1, 9), np.int32),
        "position": np.zeros(1, np.int32),
        "mask": np.zeros((8, 32), np.float16),
    }
    with pytest.raises(UserError, match=r"'tokens' has the shape \(1, 9\), expected \(1, 8\)"):
        function.predict(inputs, function.make_state())
