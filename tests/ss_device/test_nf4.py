"""Training over a base quantized to NF4: bfloat16 layers beside trained parts in float32 (v2 App. J)."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from ss_device.errors import UserError
from ss_device.reference.stream_model import StreamModel, add_lora, load_base
from ss_device.training import base_loading
from ss_device.training.adapt import AdapterSettings, build_stream_model, fit_adapter
from ss_device.training.losses import make_batch
from ss_device.training.objective import StreamLoss
from ss_device.training.schedule import AdapterSchedule
from ss_device.training.segments import split, stream_spans
from ss_device.training.settings import RunOptions
from tests.ss_device.test_device import APP_FILE, documents
from tests.ss_device.test_reference import LOSSLESS, SHARED
from tests.tiny_models import make_tiny_base

CONFIGS = LOSSLESS | SHARED
NF4 = AdapterSchedule(quantize_base="nf4", epochs=2, tokens_per_batch=40)
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # NF4 has blocks of 64 values


class HalfLinear(nn.Module):
    """The dtypes of bitsandbytes' `Linear4bit` with `bnb_4bit_compute_dtype` bfloat16.

    It computes in bfloat16 and answers in the input's dtype; its weight is no float matrix.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.half = linear.weight.detach().to(torch.bfloat16)
        self.weight = nn.Parameter(torch.zeros(4, 1, dtype=torch.uint8), requires_grad=False)
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.linear(x.to(torch.bfloat16), self.half).to(x.dtype)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_base(tmp_path_factory.mktemp("base"), **SHAPE)


def stand_in_base(base) -> nn.Module:
    """As transformers loads it: projections quantized, all else bfloat16."""
    model = load_base(base, "bfloat16")
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, module in list(block.named_children()):
                if isinstance(module, nn.Linear):
                    setattr(block, name, HalfLinear(module))
    return model


def stand_in_model(base, config) -> StreamModel:
    """Streams over the stand-in; PEFT, which knows no such layer, wraps the ones it replaces."""
    torch.manual_seed(0)
    if not config.lora_rank:
        return StreamModel(stand_in_base(base), base.architecture, config)
    model = add_lora(load_base(base, "bfloat16"), base.architecture, config)
    for module in model.modules():
        if hasattr(module, "base_layer"):
            module.base_layer = HalfLinear(module.base_layer)
    return StreamModel(model, base.architecture, config)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", [0, 6], ids=["whole", "in segments"])
def test_a_step_with_the_default_precision(base, name, size):
    """Loss, gradients of all that is trained, and ranks; the loss is the bfloat16 base's."""
    config, chosen = CONFIGS[name], documents()
    assert NF4.precision == "fp32"
    batch = make_batch(chosen, config.num_streams)
    pieces = list(split(batch, size, stream_spans(chosen, size))) if size else batch
    model = stand_in_model(base, config)
    objective = StreamLoss(model, NF4)
    loss, _ = objective(pieces)
    loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all(p.dtype == torch.float32 for p in trained.values())
    assert all(torch.isfinite(p.grad).all() for p in trained.values() if p.grad is not None)
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in trained.values())
    ranks = objective(batch, ranks=True)
    assert ranks.shape[-1] == 1 + config.num_streams
    half = StreamLoss(build_stream_model(base, config, 0), replace(NF4, quantize_base="", precision="bf16"))
    half.model.parts.load_state_dict(model.parts.state_dict())
    assert abs(half(batch)[0].item() - loss.item()) < 0.05 * loss.item()


def test_the_stand_in_answers_as_bitsandbytes_does():
    """Dtypes of the real layer, quantized, with and without autocast."""
    if sys.platform != "linux":
        pytest.skip("bitsandbytes is installed with the tests on Linux only")
    from bitsandbytes.nn import Linear4bit

    linear = nn.Linear(64, 32, bias=False)
    real = Linear4bit(64, 32, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    real.load_state_dict(linear.state_dict())
    real.to("cpu")
    ours = HalfLinear(linear)
    assert real.weight.dtype == ours.weight.dtype == torch.uint8
    for dtype in (torch.float32, torch.bfloat16):
        for half in (False, True):
            x = torch.randn(3, 64, dtype=dtype)
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                assert real(x).dtype == ours(x).dtype
            assert (real(x) - linear(x.float())).abs().max() < 0.4


def test_a_run_with_bitsandbytes(base, tmp_path):
    """The real quantization, on the CPU: an adapter is trained, and its losses are near float32's."""
    if sys.platform != "linux":
        pytest.skip("bitsandbytes is installed with the tests on Linux only")
    from ss_device.application import load_application

    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/app.toml").write_text(f'name = "tiny"{APP_FILE}')
    app, losses = load_application(str(tmp_path / "tiny")), {}
    for name, schedule in (("nf4", NF4), ("fp32", replace(NF4, quantize_base=""))):
        settings = AdapterSettings(replace(LOSSLESS["plus"], num_streams=2), schedule)
        run = RunOptions(device="cpu")
        adapter = fit_adapter(base, app, settings, documents(8), documents(2), tmp_path / name, run)
        losses[name] = np.array(list(adapter.record["final_losses"].values()))
        assert all(np.isfinite(t).all() for t in adapter.tensors.values())
    assert np.abs(losses["nf4"] / losses["fp32"] - 1).max() < 0.2
    model = build_stream_model(base, LOSSLESS["paper"], 0, NF4)
    kinds = {type(m).__name__ for m in model.base.modules()}
    assert "Linear4bit" in kinds and model.base.lm_head.weight.dtype == torch.bfloat16


def test_without_bitsandbytes(base, monkeypatch):
    monkeypatch.setattr(base_loading, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs bitsandbytes"):
        build_stream_model(base, LOSSLESS["paper"], 0, NF4)
