"""Segment attention: the losses and gradients of the plain pass and of a dense (L(1+γ))² mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from ss_device.config import SpeculativeConfig, paper_config
from ss_device.training.adapt import build_stream_model
from ss_device.training.checkpoint import trainable
from ss_device.training.corpus import Document
from ss_device.training.loop import batch_gradients, process_share
from ss_device.training.losses import make_batch
from ss_device.training.objective import StreamLoss
from ss_device.training.schedule import AdapterSchedule
from ss_device.training.segments import added, stream_spans
from ss_device.training.validation import document_ranks
from tests.ss_device.naive_mask import naive_loss
from tests.tiny_models import make_tiny_base

LORA = {"num_streams": 3, "num_msa_layers": 2, "lora_rank": 4, "lora_alpha": 8}
CONFIGS = {
    "paper": paper_config(num_streams=3, num_msa_layers=2),
    "plus": SpeculativeConfig(
        num_streams=3, num_msa_layers=2, stream_mlp="base", stream_lora_rank=4, stream_lora_alpha=8,
        bigram_rank=8,
    ),
    "shared": paper_config("shared", **LORA),
    "shared-v2": paper_config("shared", **LORA, main_attends_streams=True),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_base(tmp_path_factory.mktemp("base"))


def moved_model(base, config):
    """A model whose every trainable part is away from its start, so that all of it matters."""
    model = build_stream_model(base, config, 0)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def some_documents(lengths=((3, 14), (11, 9), (2, 3), (21, 2))) -> list[Document]:
    rng = np.random.default_rng(1)
    return [Document(rng.integers(3, 290, p + c).astype(np.int32), p) for p, c in lengths]


def gradients(model) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in trainable(model).items()}
    model.zero_grad()
    return found


def segmented(objective, batch, spans, size) -> dict[str, torch.Tensor]:
    """Loss parts of a batch in segments; gradients are left in the parameters."""
    shared = objective.model.config.mode == "shared"
    return batch_gradients(Accelerator(cpu=True), objective, batch, size, spans, shared)


@pytest.mark.parametrize("size", [3, 7, 64])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_segments_give_the_plain_losses_and_gradients(base, name, size):
    model = moved_model(base, CONFIGS[name])
    objective, docs = StreamLoss(model), some_documents()
    batch = make_batch(docs, 3)
    plain, plain_parts = objective(batch)
    plain.backward()
    wanted = gradients(model)
    parts = segmented(objective, batch, stream_spans(docs, size), size)
    assert parts.keys() == plain_parts.keys()
    for part in parts:
        torch.testing.assert_close(parts[part], plain_parts[part], rtol=1e-5, atol=1e-5)
    for parameter, gradient in gradients(model).items():
        scale = wanted[parameter].abs().max()
        assert scale > 0, parameter
        assert (gradient - wanted[parameter]).abs().max() <= 1e-4 * scale, parameter


@pytest.mark.parametrize("name", list(CONFIGS))
def test_plain_and_segments_equal_the_dense_mask(base, name):
    model = moved_model(base, CONFIGS[name])
    objective = StreamLoss(model)
    document = some_documents(((5, 9),))[0]
    streams, main, early = naive_loss(model, torch.from_numpy(document.ids).long(), 5)
    dense = objective.weights.streams[0] * streams.sum() + objective.weights.main * main + early
    dense.backward()
    wanted = gradients(model)
    batch = make_batch([document], 3)
    parts = segmented(objective, batch, stream_spans([document], 4), 4)
    for j in range(3):
        torch.testing.assert_close(parts[f"stream_{j + 1}"], streams[j].detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts["early"], early.detach(), rtol=1e-5, atol=1e-5)
    for parameter, gradient in gradients(model).items():
        difference = (gradient - wanted[parameter]).abs().max()
        assert difference <= 1e-4 * wanted[parameter].abs().max(), parameter


def test_gradient_checkpointing_changes_nothing(base):
    docs = some_documents()
    for name in ("plus", "shared-v2"):
        model, batch = moved_model(base, CONFIGS[name]), make_batch(docs, 3)
        StreamLoss(model)(batch)[0].backward()
        wanted = gradients(model)
        StreamLoss(model, AdapterSchedule(gradient_checkpointing=True))(batch)[0].backward()
        for parameter, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, wanted[parameter], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [0, 5])
@pytest.mark.parametrize("name", ["plus", "shared"])
def test_shares_of_two_processes_average_to_the_whole_batch(base, name, size):
    """Also where one process has no document of the step, and where their segments differ."""
    model = moved_model(base, CONFIGS[name])
    objective = StreamLoss(model)
    for docs in (some_documents(), some_documents(((6, 8),))):
        objective(make_batch(docs, 3))[0].backward()
        wanted = gradients(model)
        found = {}
        for rank in range(2):
            share = process_share(docs, rank, 2, 3)
            if size:
                segmented(objective, share, stream_spans(docs, size), size)
            else:
                objective(share)[0].backward()
            found = added(found, {n: g / 2 for n, g in gradients(model).items()})
        for parameter, gradient in found.items():
            difference = (gradient - wanted[parameter]).abs().max()
            assert difference <= 1e-4 * wanted[parameter].abs().max(), parameter


@pytest.mark.parametrize("name", ["plus", "shared-v2"])
def test_validation_in_segments_ranks_alike(base, name):
    objective, docs = StreamLoss(moved_model(base, CONFIGS[name])), some_documents()
    whole = document_ranks(objective, docs, 3, torch.device("cpu"))
    pieces = document_ranks(objective, docs, 3, torch.device("cpu"), segment=4)
    for one, other, document in zip(whole, pieces, docs, strict=True):
        assert len(one) == len(document.ids) - document.prompt_length
        np.testing.assert_array_equal(one, other)


def test_half_precision_is_close(base):
    model, batch = moved_model(base, CONFIGS["plus"]), make_batch(some_documents(), 3)
    exact, _ = StreamLoss(model)(batch)
    half = build_stream_model(base, CONFIGS["plus"], 0, AdapterSchedule(precision="bf16"))
    assert next(half.base.parameters()).dtype == torch.bfloat16
    half.parts.load_state_dict(model.parts.state_dict())
    rounded, _ = StreamLoss(half, AdapterSchedule(precision="bf16"))(batch)
    rounded.backward()
    assert abs(rounded.item() - exact.item()) < 0.05 * exact.item()
    assert all(p.dtype == torch.float32 and p.grad.isfinite().all() for p in trainable(half).values())
