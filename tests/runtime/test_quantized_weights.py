"""MLX-community checkpoints: mlx-lm quantizes and runs them, the runtime must give the same logits."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model, quantize_model, save_model

from ss_device.config import paper_config
from ss_device.errors import UserError
from ss_device.tree import tree_from_parents
from ss_runtime.loading import load_folders
from tests.families.back_ends import MLXBackEnd
from tests.tiny_models import make_tiny_base, random_adapter

CONFIG = paper_config(num_streams=2, num_msa_layers=2, pruning_rank=4)
CHAIN = [-1, 0, 1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny base and its copies in 4 and 8 bits."""
    folder = tmp_path_factory.mktemp("quantized")
    base = make_tiny_base(folder / "base", hidden_size=64, intermediate_size=128, head_dim=16)
    for bits in (4, 8):
        model, config = load_model(base.path)
        model, config = quantize_model(model, config, group_size=32, bits=bits)
        save_model(folder / str(bits), model)
        (folder / str(bits) / "config.json").write_text(json.dumps(config))
    return base, folder


@pytest.mark.parametrize("bits", [4, 8])
def test_logits_are_mlx_lms(folders, bits, monkeypatch):
    base, folder = folders
    monkeypatch.setattr("ss_runtime.loading.MLXStepModel", MLXBackEnd)
    settings = {"num_nodes": 8, "context": 64, "stream_rows": "kept"}
    ours = load_folders(folder / str(bits), random_adapter(base, CONFIG), "float32", **settings)
    tokens = np.random.default_rng(0).integers(3, 259, 20).tolist()
    ours.prefill(tokens[:13])
    ours.step(tree_from_parents(tokens[13:], CHAIN))
    theirs, _ = load_model(folder / str(bits))
    theirs.set_dtype(mx.float32)
    wanted = np.array(theirs(mx.array([tokens]))[0, 13:])
    assert np.abs(ours.last_logits[:7] - wanted).max() <= 1e-4 * np.abs(wanted).max()
    plain = load_folders(base.path, random_adapter(base, CONFIG), "float32", **settings)
    plain.prefill(tokens[:13])
    plain.step(tree_from_parents(tokens[13:], CHAIN))
    assert np.abs(ours.last_logits - plain.last_logits).max() > 1e-3  # it is really quantized


def test_other_quantizations_are_refused_by_name(folders, tmp_path):
    base, folder = folders
    tensors = dict(mx.load(str(folder / "4" / "model.safetensors")))
    del tensors["model.layers.1.mlp.up_proj.biases"]
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    (tmp_path / "config.json").write_text((folder / "4" / "config.json").read_text())
    with pytest.raises(UserError, match="layers.1.mlp.up"):
        load_folders(tmp_path, random_adapter(base, CONFIG), num_nodes=4, context=64)
