"""Quantized bases: MLX-community checkpoints against mlx-lm, our own packing against unpacked weights."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model as load_with_mlx_lm
from mlx_lm.utils import quantize_model, save_model

from ss_device.config import paper_config
from ss_device.decoding import Drafter, decode
from ss_device.errors import UserError
from ss_device.reference.step_model import ReferenceStepModel
from ss_device.reference.stream_model import attach_adapter
from ss_device.tree import tree_from_parents
from ss_runtime.mlx.adapter_bank import AdapterBank
from ss_runtime.mlx.loading import LoadedFolder, load_model
from ss_runtime.mlx.quantized_weights import SCHEMES
from ss_runtime.settings import QUANTIZATIONS, RuntimeSettings
from tests.families.back_ends import MLXBackEnd
from tests.runtime.bundles import make_bundle
from tests.tiny_models import make_tiny_base, random_adapter

CONFIG = paper_config(num_streams=2, num_msa_layers=2, pruning_rank=4)
CHAIN = [-1, 0, 1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny base and its copies in 4 and 8 bits."""
    folder = tmp_path_factory.mktemp("quantized")
    base = make_tiny_base(folder / "base", hidden_size=64, intermediate_size=128, head_dim=16)
    for bits in (4, 8):
        model, config = load_with_mlx_lm(base.path)
        model, config = quantize_model(model, config, group_size=32, bits=bits)
        save_model(folder / str(bits), model)
        (folder / str(bits) / "config.json").write_text(json.dumps(config))
    return base, folder


@pytest.mark.parametrize("bits", [4, 8])
def test_logits_are_mlx_lms(folders, bits, monkeypatch):
    base, folder = folders
    monkeypatch.setattr("ss_runtime.mlx.loading.MLXStepModel", MLXBackEnd)
    settings = RuntimeSettings(dtype="float32", num_nodes=8, context=64, stream_rows="kept")
    ours = LoadedFolder(folder / str(bits)).model(random_adapter(base, CONFIG), settings)
    tokens = np.random.default_rng(0).integers(3, 259, 20).tolist()
    ours.prefill(tokens[:13])
    ours.step(tree_from_parents(tokens[13:], CHAIN))
    theirs, _ = load_with_mlx_lm(folder / str(bits))
    theirs.set_dtype(mx.float32)
    wanted = np.array(theirs(mx.array([tokens]))[0, 13:])
    assert np.abs(ours.last_logits[:7] - wanted).max() <= 1e-4 * np.abs(wanted).max()
    plain = LoadedFolder(base.path).model(random_adapter(base, CONFIG), settings)
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
        LoadedFolder(tmp_path).model(random_adapter(base, CONFIG), RuntimeSettings(num_nodes=4, context=64))


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def unpacked(weights: np.ndarray, scheme: str) -> np.ndarray:
    """What a matrix is after quantization, by the formats' definitions in numpy, float32.

    Affine: MLX's codes and factors, code · scale + bias with code i in bits i·b.. of the words. mxfp4:
    E2M1 values times a power of two per 32 (the OCP microscaling format), scales stored as exponent + 127.
    """
    bits, mode, sizes = SCHEMES[scheme]
    size = next(s for s in sizes if weights.shape[1] % s == 0)
    packed, scales, *biases = (
        np.array(a) for a in mx.quantize(mx.array(weights), group_size=size, bits=bits, mode=mode)
    )
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = ((packed[:, :, None] >> shifts) & (2**bits - 1)).reshape(len(weights), -1, size)
    if mode == "affine":
        return (codes * scales[:, :, None] + biases[0][:, :, None]).reshape(weights.shape)
    values = FP4[codes & 7] * np.where(codes & 8, -1, 1) * 2.0 ** (scales[:, :, None].astype(float) - 127)
    return values.reshape(weights.shape).astype(np.float32)


@pytest.fixture(scope="module")
def quantizable(folders, tmp_path_factory):
    base, _ = folders
    folder = tmp_path_factory.mktemp("quantizable") / "bundle"
    return base, make_bundle(folder, base, {"one": CONFIG}, num_nodes=8)


@pytest.mark.parametrize("scheme", QUANTIZATIONS)
def test_tokens_are_those_of_the_dequantized_weights_in_float32(quantizable, scheme):
    """The PyTorch reference computes with the unpacked weights; MLX with the packed ones."""
    from transformers import LlamaForCausalLM

    base, bundle = quantizable
    model = LlamaForCausalLM.from_pretrained(base.path).eval()
    exact = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.data.numpy()[:] = unpacked(exact[name], scheme)
            assert not np.array_equal(parameter.data.numpy(), exact[name])
    adapter = random_adapter(base, CONFIG, seed=0)
    reference = ReferenceStepModel(attach_adapter(model, base.architecture, adapter), 8, 8)
    mlx = load_model(
        bundle, bundle.adapter(), RuntimeSettings(dtype="float32", quantize=scheme, stream_rows="kept")
    )
    prompt = np.random.default_rng(4).integers(3, 259, 13).tolist()
    ours, theirs = (list(decode(m, Drafter(8), prompt, 16)) for m in (mlx, reference))
    assert [s.tokens for s in ours] == [s.tokens for s in theirs]
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        scale = np.abs(b.verified.stream_logits).max()
        assert np.abs(a.verified.stream_logits - b.verified.stream_logits).max() <= 1e-3 * scale
    bank = AdapterBank(bundle, RuntimeSettings(dtype="float32", quantize=scheme))
    assert bank.base_bytes < AdapterBank(bundle, RuntimeSettings(dtype="float32")).base_bytes / 2
    steps = decode(bank.activate("one").model, Drafter(8), prompt, 16)
    assert [t for s in steps for t in s.tokens] == [t for s in ours for t in s.tokens]


def test_what_cannot_be_quantized_is_refused(quantizable, tmp_path):
    from tests.tiny_models import make_tiny_base

    _, bundle = quantizable
    assert set(SCHEMES) == set(QUANTIZATIONS)
    with pytest.raises(UserError, match="'3' is not one of 4, 8, mxfp4"):
        load_model(bundle, bundle.adapter(), RuntimeSettings(quantize="3"))
    odd = make_tiny_base(tmp_path / "odd", hidden_size=48, head_dim=12)
    other = make_bundle(tmp_path / "bundle", odd, {"one": CONFIG})
    with pytest.raises(UserError, match="its rows of 48"):
        load_model(other, other.adapter(), RuntimeSettings(quantize="4"))
