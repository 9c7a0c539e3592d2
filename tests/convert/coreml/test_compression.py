"""Compressed weights: what is stored, and packages against the reference with the dequantized weights."""

from __future__ import annotations

import numpy as np
import pytest

from ss_convert.coreml.convert import GraphOptions, write_package
from ss_convert.graph.compression import Palettized, Quantized, compress
from ss_convert.graph.weight_format import largest_divisor
from ss_convert.graph.weights import BaseWeights
from ss_convert.stored_weights import decompressed_constants, stored_weights
from ss_device.config import SpeculativeConfig, paper_config
from ss_device.errors import UserError
from ss_device.reference.replaced_weights import with_weights
from ss_device.reference.step_model import ReferenceStepModel
from ss_executor import load_package
from tests.convert.cases import Pair, compare_steps, open_package, prompt_ids
from tests.tiny_models import make_tiny_base, random_adapter

CONFIG = SpeculativeConfig(num_streams=2, num_msa_layers=1, stream_lora_rank=2, stream_lora_alpha=2.0)
SHARED = paper_config("shared", num_streams=2, num_msa_layers=1, lora_rank=2, lora_alpha=6.0)
WEIGHT = np.random.default_rng(0).normal(0, 0.1, (24, 96)).astype(np.float16)
# Weight formats of the projections and of the embedding: every one in both places.
FORMATS = (("int8", "lut4"), ("int4", "lut6"), ("lut4", "int8"), ("lut6", "int4"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_base(
        tmp_path_factory.mktemp("base") / "tiny", dtype="float16", tie_word_embeddings=False
    )


@pytest.mark.parametrize(("weight_format", "blocks", "largest"), [("int8", 1, 127), ("int4", 3, 7)])
def test_integers_are_the_nearest_multiples_of_their_scale(weight_format, blocks, largest):
    stored = compress(WEIGHT, weight_format)
    assert isinstance(stored, Quantized) and stored.scale.shape == (24, blocks)
    assert stored.scale.dtype == np.float16 and np.abs(stored.data).max() == largest
    scale = np.repeat(stored.scale.astype(np.float64), 96 // blocks, axis=1)
    error = np.abs(stored.data * scale - WEIGHT.astype(np.float64))
    # The scale is rounded too: the largest value of a block may miss by a little more than half a step.
    assert np.all(error <= scale * (0.5 + largest * 2.0**-11))


def test_zeros_and_values_below_fp16_scales_stay_finite():
    weight = np.zeros((4, 32), np.float16)
    weight[1] = np.float16(2.0**-24)
    for weight_format in ("int8", "int4"):
        stored = compress(weight, weight_format)
        assert np.all(np.isfinite(stored.scale)) and not stored.data[0].any()


@pytest.mark.parametrize(("weight_format", "groups", "values"), [("lut4", 3, 16), ("lut6", 2, 64)])
def test_tables_hold_the_nearest_values(weight_format, groups, values):
    stored = compress(WEIGHT, weight_format)
    assert isinstance(stored, Palettized) and stored.table.shape == (groups, values)
    for group, rows in enumerate(np.split(np.arange(24), groups)):
        distance = np.abs(
            WEIGHT[rows][..., None].astype(np.float32) - stored.table[group].astype(np.float32)
        )
        used = np.take_along_axis(distance, stored.indices[rows][..., None].astype(np.int64), -1)[..., 0]
        assert np.all(used <= distance.min(axis=-1) + 1e-4)
    again = compress(WEIGHT, weight_format)
    np.testing.assert_array_equal(again.indices, stored.indices)
    np.testing.assert_array_equal(again.table, stored.table)


def test_group_sizes_divide_what_is_grouped():
    assert [largest_divisor(n, 16) for n in (32, 300, 7, 17)] == [16, 15, 7, 1]
    assert compress(WEIGHT[:17], "lut6").table.shape == (1, 64)


@pytest.mark.parametrize(("weights", "embedding"), FORMATS)
def test_package_equals_the_reference_with_its_dequantized_weights(base, tmp_path, weights, embedding):
    config = SHARED if weights == "lut4" else CONFIG
    adapter = random_adapter(base, config)
    options = GraphOptions(6, 4, 48, 8, weights=weights, embedding_weights=embedding)
    path = tmp_path / "coreml" / "tiny.mlpackage"
    functions = write_package(base.architecture, base.weights(), adapter, options, path)
    assert (functions.weights, functions.embedding_weights) == (weights, embedding)
    dense = stored_weights(path, functions.step, base.weights(), base.architecture)
    reference = ReferenceStepModel(with_weights(base, dense, adapter), 6, 4, 48)
    coreml = open_package(path, functions, config, base.architecture)
    compare_steps(Pair(path, adapter, coreml, reference), prompt_ids(11), [6] * 5)
    for name, values in base.weights().items():
        is_matrix = values.ndim == 2
        changed = not np.array_equal(dense[name], values.astype(np.float32))
        assert changed == is_matrix, name


def test_both_functions_share_the_compressed_weights(base, tmp_path):
    sizes = {}
    adapter = random_adapter(base, CONFIG)
    for weight_format in ("fp16", "int8"):
        path = tmp_path / weight_format / "tiny.mlpackage"
        options = GraphOptions(4, 4, 16, 4, weights=weight_format, embedding_weights=weight_format)
        write_package(base.architecture, base.weights(), adapter, options, path)
        sizes[weight_format] = (path / "Data/com.apple.CoreML/weights/weight.bin").stat().st_size
    matrices = sum(w.size for w in base.weights().values() if w.ndim == 2)
    assert 0.85 * matrices < sizes["fp16"] - sizes["int8"] <= matrices
    names = decompressed_constants(path, "tiny_prefill").keys()
    assert {"embed_weight", "layers_0_attn_q_weight"} <= names and "norm_weight" not in names


def test_stored_weights_refuses_a_package_of_another_base(base, tmp_path):
    options = GraphOptions(2, 2, 16, 4, weights="int8", embedding_weights="int8")
    path = tmp_path / "c" / "tiny.mlpackage"
    write_package(base.architecture, base.weights(), random_adapter(base, CONFIG), options, path)
    assert load_package(path).weight_bytes > 0
    fewer = {k: v for k, v in base.weights().items() if k != "layers.0.attn.q.weight"}
    with pytest.raises(UserError, match="layers_0_attn_q_weight"):
        stored_weights(path, "tiny_step", fewer, base.architecture)
    other = {**base.weights(), "head.weight": np.zeros((2, 32), np.float16)}
    with pytest.raises(UserError, match="head.weight"):
        stored_weights(path, "tiny_step", other, base.architecture)


def test_vectors_are_never_compressed(base):
    stored = BaseWeights(base.architecture, base.weights(), "int4", "lut4")
    assert stored.weight_format("norm.weight") == "fp16" and stored.weight_format("head.weight") == "lut4"
    assert stored.weight_format("layers.1.mlp.up.weight") == "int4"
    np.testing.assert_array_equal(stored.stored("norm.weight"), base.weights()["norm.weight"])
