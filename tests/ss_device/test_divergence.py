"""KL from the base's own distribution to a stream's, against sums written by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ss_device.config import SpeculativeConfig, paper_config
from ss_device.training.adapt import build_stream_model
from ss_device.training.corpus import Document
from ss_device.training.losses import forward, make_batch, stream_divergence
from ss_device.training.objective import StreamLoss
from ss_device.training.schedule import AdapterSchedule
from tests.tiny_models import make_tiny_base


def test_zero_when_the_distributions_agree_and_by_hand_otherwise():
    main = torch.log(torch.tensor([[[0.5, 0.5], [0.25, 0.75], [0.9, 0.1]]]))
    targets = torch.tensor([[1, 0, -100]])
    agree = main[:, [1, 2, 0]] + 3.0  # a constant changes no distribution
    assert float(stream_divergence(agree, main, targets, 1, (targets >= 0).sum())) == pytest.approx(
        0.0, abs=1e-6
    )
    flat = torch.zeros(1, 3, 2)
    wanted = [
        0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5),
        0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5),
    ]
    assert float(stream_divergence(flat, main, targets, 1, (targets >= 0).sum())) == pytest.approx(
        sum(wanted) / 2, rel=1e-5
    )
    only = torch.tensor([[1, -100, -100]])
    assert float(stream_divergence(flat, main, only, 2, (only >= 0).sum())) == pytest.approx(
        wanted[1], rel=1e-5
    )


@pytest.mark.parametrize("mode", ["lossless", "shared"])
def test_the_teacher_is_the_hugging_face_model_and_gets_no_gradient(tmp_path, mode):
    """Every stream's KL, recomputed one target at a time from the base's own forward pass."""
    base = make_tiny_base(tmp_path / "base")
    sizes = {"num_streams": 2, "num_msa_layers": 2}
    lora = {"lora_rank": 2, "lora_alpha": 4}
    config = SpeculativeConfig(**sizes) if mode == "lossless" else paper_config("shared", **sizes, **lora)
    model = build_stream_model(base, config, 0)
    spans = ((3, 7), (9, 12))
    ids = np.array([1, 30, 31, 40, 41, 42, 2, 33, 34, 50, 51, 2], np.int32)
    batch = make_batch([Document(ids, 3, spans)], 2)
    loss, parts = StreamLoss(model, AdapterSchedule(loss="kl"))(batch)
    loss.backward()
    with torch.no_grad():
        teacher = (
            model.base(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
        )
        student = forward(model, batch, main=False, early=False).streams[0].log_softmax(-1)
    for j in (1, 2):
        values = []
        for row, i in enumerate([2, 3, 4, 5, 8, 9, 10]):
            end = 7 if i < 6 else 12
            if i + 1 + j < end:
                t, s = teacher[i + j], student[row, j - 1]
                values.append(float((t.exp() * (t - s)).sum()))
        assert float(parts[f"stream_{j}"]) == pytest.approx(float(np.mean(values)), rel=1e-4)
    gradient = model.parts.stream_embeddings.grad
    assert gradient is not None and gradient.abs().sum() > 0
