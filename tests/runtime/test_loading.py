"""A bundle's MLX files, written and loaded again."""

import shutil

import mlx.core as mx
import numpy as np
import pytest

from ss_convert.mlx.weights import write_adapter, write_base
from ss_device.bundle import MLX_BASE, BundledAdapter, Manifest, open_bundle, write_manifest
from ss_device.decoding import Drafter, decode
from ss_device.errors import UserError
from ss_runtime.mlx.loading import fastest_stream_rows, load_model
from ss_runtime.settings import RuntimeSettings
from ss_runtime.tokenization import load_tokenizer
from tests.runtime.mlx_cases import CONFIGS, PROMPT, SHARED, mlx_model
from tests.tiny_models import make_tiny_base, random_adapter


def write_bundle(base, adapter, folder):
    tensor_file = f"mlx/adapters/{adapter.app}.safetensors"
    write_base(base.weights(), folder / MLX_BASE)
    write_adapter(adapter, folder / tensor_file)
    shutil.copy(base.path / "tokenizer.json", folder)
    bundled = BundledAdapter(
        adapter.app, adapter.config, "{prompt}", (), 24, num_nodes=6, tensor_file=tensor_file
    )
    write_manifest(folder, Manifest(base.architecture, base.identity, {adapter.app: bundled}))
    return open_bundle(folder)


@pytest.mark.parametrize("config", [CONFIGS["rich"], SHARED[True]], ids=["lossless", "shared"])
def test_a_loaded_model_is_the_model_from_arrays(tmp_path, config):
    base = make_tiny_base(tmp_path / "base", dtype="float16")
    adapter = random_adapter(base, config)
    bundle = write_bundle(base, adapter, tmp_path / "bundle")
    loaded = load_model(bundle, bundle.adapter(), RuntimeSettings(dtype="float32", num_kept=4))
    direct = mlx_model(base, adapter, num_nodes=6, num_kept=4, stream_rows=fastest_stream_rows(config))
    assert loaded.limits.num_nodes == 6 and loaded.limits.context == base.architecture.max_positions
    outputs = [list(decode(m, Drafter(6), PROMPT, 20)) for m in (loaded, direct)]
    assert [s.tokens for s in outputs[0]] == [s.tokens for s in outputs[1]]
    assert np.array_equal(outputs[0][1].verified.stream_logits, outputs[1][1].verified.stream_logits)
    assert load_tokenizer(bundle).encode("a")[0] == base.architecture.bos_id


def test_streams_run_apart_on_a_cpu_unless_main_attends_them():
    assert fastest_stream_rows(SHARED[True]) == "kept"
    on_cpu = mx.default_device() == mx.cpu
    assert fastest_stream_rows(CONFIGS["paper"]) == ("accepted" if on_cpu else "kept")


def test_missing_and_damaged_files_are_user_errors(mlx_base, tmp_path):
    bundle = write_bundle(mlx_base, random_adapter(mlx_base, CONFIGS["paper"]), tmp_path / "bundle")
    file = bundle.path / bundle.adapter().tensor_file
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        load_model(bundle, bundle.adapter())
    integers = dict(mx.load(str(bundle.path / MLX_BASE)))
    integers["layers.1.attn.v.weight"] = mx.zeros(integers["layers.1.attn.v.weight"].shape, mx.int32)
    mx.save_safetensors(str(bundle.path / MLX_BASE), integers)
    write_adapter(random_adapter(mlx_base, CONFIGS["paper"]), file)
    with pytest.raises(UserError, match="'layers.1.attn.v.weight' is stored as mlx.core.int32"):
        load_model(bundle, bundle.adapter())
    (bundle.path / MLX_BASE).unlink()
    with pytest.raises(UserError, match="without MLX weights"):
        load_model(bundle, bundle.adapter())
    (bundle.path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="not a readable tokenizer"):
        load_tokenizer(bundle)
