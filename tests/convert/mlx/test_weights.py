"""MLX weight files."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from ss_convert.mlx.weights import write_adapter, write_base
from ss_device.config import paper_config
from ss_device.errors import UserError
from ss_runtime.mlx.decoder import adapter_shapes
from tests.tiny_models import VOCAB, make_tiny_base, random_adapter


def test_base_is_stored_exactly_in_half_precision(tmp_path):
    base = make_tiny_base(tmp_path / "base", dtype="float16", tie_word_embeddings=False)
    write_base(base.weights(), tmp_path / "mlx" / "base.safetensors")
    stored = load_file(tmp_path / "mlx" / "base.safetensors")
    assert {n: t.shape for n, t in stored.items()} == base.architecture.weight_shapes()
    for name, tensor in base.weights().items():
        assert stored[name].dtype == np.float16 and np.array_equal(stored[name], tensor)


@pytest.mark.parametrize("mode", ["lossless", "shared"])
def test_adapter_has_the_names_that_the_runtime_reads(tmp_path, mode):
    base = make_tiny_base(tmp_path / "base")
    config = paper_config(mode, num_msa_layers=2, bigram_rank=4, stream_lora_rank=2, stream_init_rank=2)
    adapter = random_adapter(base, config)
    write_adapter(adapter, tmp_path / "tiny.safetensors")
    stored = load_file(tmp_path / "tiny.safetensors")
    shapes = {n: t.shape for n, t in stored.items()}
    assert shapes.pop("bigram.u") == shapes.pop("bigram.v") == (VOCAB, 4)  # the host's, not the decoder's
    assert shapes == adapter_shapes(config, base.architecture)
    for name, (a, b) in adapter.lora.items():
        assert np.array_equal(stored[f"lora.{name}.a"], a) and np.array_equal(stored[f"lora.{name}.b"], b)


def test_values_beyond_half_precision_are_refused(tmp_path):
    with pytest.raises(UserError, match="'norm.weight'"):
        write_base({"norm.weight": np.array([1e6], np.float32)}, tmp_path / "base.safetensors")
