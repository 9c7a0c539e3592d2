"""Checkpoints on disk: shards, number formats, fused tensors, damage, memory during a conversion."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from ss_convert.mlx.weights import write_base
from ss_device.adapter import save_adapter
from ss_device.base_model import INDEX_FILE, open_base
from ss_device.checkpoint_weights import stored_tensors, write_tensors
from ss_device.config import paper_config
from ss_device.errors import UserError
from ss_device.files import read_tensors
from tests.families.tiny import make_base
from tests.tiny_models import make_tiny_base, random_adapter, write_byte_tokenizer


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_shards_and_formats_give_what_hugging_face_loads(tmp_path, dtype):
    base = make_tiny_base(tmp_path / "whole", tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=getattr(torch, dtype))
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    write_byte_tokenizer(tmp_path / "shards")
    sharded = open_base(tmp_path / "shards")
    assert (sharded.path / INDEX_FILE).is_file()
    weights = sharded.stored_weights()
    wanted = {n: t.float().numpy() for n, t in model.state_dict().items()}
    np.testing.assert_array_equal(weights["embed.weight"], wanted["model.embed_tokens.weight"])
    name = "model.layers.2.mlp.down_proj.weight"
    np.testing.assert_array_equal(weights["layers.2.mlp.down.weight"], wanted[name])
    assert len(weights) == len(wanted)
    assert weights["norm.weight"].dtype == (np.float16 if dtype == "float16" else np.float32)


def test_fused_tensors_are_read_in_parts(tmp_path):
    base = make_base("phi3", tmp_path)
    stored, weights = read_tensors(tmp_path / "model.safetensors"), base.weights()
    parts = [weights[f"layers.1.attn.{name}.weight"] for name in "qkv"]
    np.testing.assert_array_equal(np.concatenate(parts), stored["model.layers.1.self_attn.qkv_proj.weight"])
    gate = stored["model.layers.1.mlp.gate_up_proj.weight"][: base.architecture.intermediate_size]
    np.testing.assert_array_equal(weights["layers.1.mlp.gate.weight"], gate)


def test_a_missing_shard_is_named(tmp_path):
    base = make_tiny_base(tmp_path / "base")
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (base.path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(UserError, match="model-00002-of-00002.safetensors"):
        open_base(base.path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "'norm.weight' is missing"),
        ({"model.norm.weight": torch.ones(3)}, r"'norm.weight' has shape \(3,\)"),
        ({"model.odd.weight": torch.ones(3)}, "unexpected weight 'model.odd.weight'"),
        ({"model.layers.0.self_attn.q_proj.scales": torch.ones(3)}, "quantized .layers.0.attn.q. does"),
        ({"model.norm.weight": torch.ones(32, dtype=torch.uint8)}, "number format U8"),
    ],
)
def test_a_wrong_checkpoint_is_refused_by_name(tmp_path, change, message):
    base = make_tiny_base(tmp_path / "base")
    tensors = {n: torch.from_numpy(t) for n, t in read_tensors(base.path / "model.safetensors").items()}
    tensors = {n: t for n, t in (tensors | change).items() if t is not None}
    save_file(tensors, base.path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        base.stored_weights()


def test_a_truncated_file_is_refused(tmp_path):
    base = make_tiny_base(tmp_path / "base")
    file = base.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="ends too early"):
        base.stored_weights()
    file.write_bytes(b"no tensors here")
    with pytest.raises(UserError, match="not a readable safetensors file"):
        base.stored_weights()


def test_written_tensors_are_read_by_the_library(tmp_path):
    arrays = {"a": np.arange(6, dtype=np.float16).reshape(2, 3), "b.c": np.ones((0, 4), np.float16)}
    write_tensors(tmp_path / "x.safetensors", {n: a.shape for n, a in arrays.items()}, arrays.__getitem__)
    for name, array in read_tensors(tmp_path / "x.safetensors").items():
        np.testing.assert_array_equal(array, arrays[name])
        np.testing.assert_array_equal(stored_tensors(tmp_path / "x.safetensors")[name].read(), array)


# Prints by how many kilobytes a conversion to MLX, checks included, makes the process grow at its largest.
PEAK = """
import resource, sys
from pathlib import Path
from ss_convert.conversion import run_plan
from ss_convert.planning import plan_conversion
from ss_convert.settings import ConversionSettings
base, adapter, output = map(Path, sys.argv[1:])
places = {"base": base, "models": base.parent, "output": output}
wanted = ConversionSettings(adapters=(str(adapter),), **places, targets=("mlx",), golden=False)
plan = plan_conversion(wanted)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run_plan(plan)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_conversion_needs_less_memory_than_its_largest_shard(tmp_path, dtype):
    """Several shards of which one tensor, the embedding, is the largest; what is written is half of it."""
    sizes = {"vocab_size": 40_000, "hidden_size": 512, "intermediate_size": 8192, "head_dim": 128}
    base = make_tiny_base(tmp_path / "base", **sizes)
    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=getattr(torch, dtype))
    model.save_pretrained(tmp_path / "shards", max_shard_size="85MB" if dtype == "float32" else "43MB")
    write_byte_tokenizer(tmp_path / "shards")
    sharded = open_base(tmp_path / "shards")
    adapter = random_adapter(sharded, paper_config(num_msa_layers=1))
    save_adapter(adapter, sharded.architecture, tmp_path / "adapter")
    shards = [f.stat().st_size for f in (tmp_path / "shards").glob("*.safetensors")]
    written = 2 * max(math.prod(shape) for shape in sharded.architecture.weight_shapes().values())
    assert len(shards) > 2
    arguments = [tmp_path / "shards", tmp_path / "adapter", tmp_path / "out"]
    out = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    widened = 2 if dtype == "bfloat16" else 1  # numpy has no bfloat16
    assert int(out.stdout) * 1024 <= 1.3 * widened * max(shards) + written
    assert set(read_tensors(tmp_path / "out/mlx/base.safetensors")) == set(base.weights())


def test_half_precision_that_does_not_fit_is_named(tmp_path):
    with pytest.raises(UserError, match="'big'"):
        write_base({"big": np.full((2, 2), 1e6, np.float32)}, tmp_path / "x.safetensors")
