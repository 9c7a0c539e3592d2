"""The saved package: names, shapes, metadata, shared weights, options, what the modules import."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path

import coremltools as ct
import numpy as np
import pytest

import ss_convert.coreml
from ss_convert.coreml.convert import GraphOptions, write_package
from ss_convert.coreml.package import merge_functions
from ss_convert.graph.interface import (
    function_names,
    num_slots,
    prefill_inputs,
    state_shape,
    step_inputs,
)
from ss_convert.graph.tables import own_stream_mask, rotary_table
from ss_convert.graph.weights import ExportWeights, to_half
from ss_device.config import SpeculativeConfig, paper_config
from ss_device.errors import UserError
from ss_device.tree import root_only
from ss_executor import load_package
from tests.convert.cases import open_package, plain_text, prompt_ids
from tests.tiny_models import make_tiny_base, random_adapter

CONFIG = SpeculativeConfig(num_msa_layers=1, num_streams=2, bigram_rank=2)
OPTIONS = GraphOptions(num_nodes=4, num_kept=3, context=24, chunk=6)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "tiny"
    return make_tiny_base(folder, dtype="float16", vocab_size=1200, num_hidden_layers=2)


@pytest.fixture(scope="module")
def written(base, tmp_path_factory):
    path = tmp_path_factory.mktemp("bundle") / "coreml" / "tiny.mlpackage"
    adapter = random_adapter(base, CONFIG)
    return path, adapter, write_package(base.architecture, base.weights(), adapter, OPTIONS, path)


def test_functions_have_the_documented_inputs_outputs_and_state(base, written):
    path, _, functions = written
    assert functions.package == "coreml/tiny.mlpackage"
    assert (functions.prefill, functions.step) == ("tiny_prefill", "tiny_step")
    package = load_package(path)
    assert set(package.functions) == {functions.prefill, functions.step}
    documented = {
        functions.prefill: prefill_inputs(OPTIONS),
        functions.step: step_inputs(CONFIG, OPTIONS),
    }
    for name, inputs in documented.items():
        function = package.functions[name]
        found = {f.name: (_numpy_name(f.dtype), f.shape) for f in function.inputs.values()}
        assert found == inputs
        state = function.states["kv_cache"]
        assert (_numpy_name(state.dtype), state.shape) == (
            "float16",
            state_shape(base.architecture, OPTIONS),
        )
    outputs = package.functions[functions.step].outputs
    assert {n: (_numpy_name(f.dtype), f.shape) for n, f in outputs.items()} == {
        "kept": ("int32", (3,)),
        "chosen": ("int32", (3,)),
        "accepted": ("int32", (1,)),
        "stream_logits": ("float16", (2, 1200)),
    }


def test_the_runtime_feeds_exactly_the_documented_inputs(base, written):
    path, adapter, functions = written
    model = open_package(path, functions, adapter.config, base.architecture)
    fed = {n: (a.dtype.name, a.shape) for n, a in model.step_inputs(root_only(5)).items()}
    assert fed == step_inputs(CONFIG, OPTIONS)


def test_metadata_survives_the_merge(base, written):
    path, _, functions = written
    metadata = load_package(path).metadata
    assert metadata["apps"] == "tiny" and metadata["base_sha256"] == base.identity.sha256
    assert metadata["context"] == "24" and json.loads(metadata["adapter.tiny"])["num_kept"] == 3
    assert (metadata["lora"], metadata["preset"]) == ("baked", "none")
    assert ct.utils.load_spec(str(path)).description.defaultFunctionName == functions.step


def test_base_weights_are_stored_once(base, written):
    path, _, _ = written
    stored = (path / "Data/com.apple.CoreML/weights/weight.bin").stat().st_size
    weights = sum(2 * w.size for w in base.weights().values())
    assert weights < stored < 1.35 * weights


def test_several_adapters_merge_into_one_package(base, written, tmp_path):
    first, adapter, functions = written
    second = tmp_path / "other.mlpackage"
    other = replace(random_adapter(base, CONFIG, seed=9), app="other")
    others = write_package(base.architecture, base.weights(), other, OPTIONS, second)
    both = tmp_path / "both.mlpackage"
    sources = {name: (first, name) for name in (functions.prefill, functions.step)}
    sources |= {name: (second, name) for name in (others.prefill, others.step)}
    merge_functions(sources, functions.step, {"app": "both"}, both)
    assert set(load_package(both).functions) == {
        functions.prefill,
        functions.step,
        others.prefill,
        others.step,
    }
    size = "Data/com.apple.CoreML/weights/weight.bin"
    assert (both / size).stat().st_size < 1.3 * (first / size).stat().st_size
    texts = {}
    for path, names, config in ((both, others, other.config), (second, others, other.config)):
        model = open_package(path, names, config, base.architecture)
        texts[path] = plain_text(model, prompt_ids(5), 6)
    assert texts[both] == texts[second]


def test_a_package_is_replaced_whole_and_leaves_nothing_beside_it(base, written):
    path, adapter, _ = written
    before = sorted(p.name for p in path.parent.iterdir())
    write_package(base.architecture, base.weights(), adapter, OPTIONS, path)
    assert sorted(p.name for p in path.parent.iterdir()) == before == ["tiny.mlpackage"]


def test_lora_stays_beside_the_base_weights(base):
    config = paper_config("shared", num_msa_layers=1, lora_rank=4, lora_alpha=6.0)
    adapter = random_adapter(base, config)
    exported = ExportWeights(base.architecture, base.weights(), adapter)
    name = "layers.1.mlp.down"
    a, b, scale = exported.lora(name)
    np.testing.assert_array_equal(a, adapter.lora[name][0])
    np.testing.assert_array_equal(b, adapter.lora[name][1])
    assert scale == 1.5 and exported.lora("layers.1.attn.other") is None
    np.testing.assert_array_equal(exported.base(f"{name}.weight"), base.weights()[f"{name}.weight"])


def test_stream_mask_by_hand():
    config = paper_config("shared", num_streams=2, main_attends_streams=True, lora_rank=2)
    visible = own_stream_mask(config, 2) == 0
    assert visible.astype(int).tolist() == [
        [1, 1, 0, 0],
        [0, 0, 1, 1],
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 1, 1],
    ]
    lossless = SpeculativeConfig(num_streams=2)
    assert not (own_stream_mask(lossless, 2)[:2] == 0).any()


def test_rotary_table_against_the_formula(base):
    d, theta = base.architecture.head_dim, base.architecture.rope_theta
    table = rotary_table(base.architecture, 300)
    angle = 257 * theta ** (-2.0 * np.arange(d // 2) / d)
    np.testing.assert_allclose(table.values[257, : d // 2], np.cos(angle), atol=1e-4)
    np.testing.assert_allclose(table.values[257, d // 2 :], np.sin(angle), atol=1e-4)
    assert table.values.shape == (300, d) and table.values.dtype == np.float32
    assert table.scale == pytest.approx(1 / np.sqrt(d))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_nodes": 4, "num_kept": 5},
        {"context": 0},
        {"chunk": 0},
        {"num_nodes": 0, "num_kept": 0},
        {"num_nodes": 4096},
        {"prune_over": "both"},
    ],
)
def test_options_that_cannot_be_are_refused(changes):
    with pytest.raises(UserError):
        GraphOptions(**changes)


def test_what_does_not_fit_is_refused_by_name(base, tmp_path):
    adapter, weights = random_adapter(base, CONFIG), base.weights()
    path = tmp_path / "t.mlpackage"
    with pytest.raises(UserError, match="context 512 exceeds the base model's 256 positions"):
        write_package(base.architecture, weights, adapter, GraphOptions(), path)
    large = {**weights, "norm.weight": np.full(32, 1e5, np.float32)}
    with pytest.raises(UserError, match="norm.weight"):
        write_package(base.architecture, large, adapter, OPTIONS, path)
    with pytest.raises(UserError, match="missing"):
        write_package(base.architecture, {}, adapter, OPTIONS, path)
    assert not list(tmp_path.iterdir())


def test_values_beyond_half_precision_are_refused():
    assert to_half("x", np.array([65504.0])).dtype == np.float16
    for value in (7e4, np.inf, np.nan):
        with pytest.raises(UserError, match="x"):
            to_half("x", np.array([value]))


@pytest.mark.parametrize(
    ("app", "stem"), [("sqlctx", "sqlctx"), ("e2e-nlg", "e2e_nlg"), ("2nd", "app_2nd")]
)
def test_function_names_are_identifiers(app, stem):
    assert function_names(app) == (f"{stem}_prefill", f"{stem}_step")


def test_scratch_takes_a_step_or_an_overhanging_chunk():
    assert num_slots(GraphOptions(4, 4, 24, 6)) == 30
    assert num_slots(GraphOptions(8, 4, 24, 6)) == 32


def test_the_exporter_needs_neither_torch_nor_mlx():
    for file in Path(ss_convert.coreml.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            roots = {name.split(".")[0] for name in names}
            assert not roots & {"torch", "mlx", "mlx_lm", "transformers", "ss_runtime"}, file.name


def _numpy_name(dtype: str) -> str:
    return {"fp16": "float16", "fp32": "float32"}.get(dtype, dtype)
