"""Value rotation and top-p stream attention against arithmetic written here."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ss_device.config import paper_config, parameter_count, tensor_shapes
from ss_device.errors import UserError
from ss_device.reference.stream_model import Rows, _rotate, load_stream_model
from ss_device.training.corpus import Document
from ss_device.training.losses import forward, make_batch
from tests.tiny_models import make_tiny_base, random_adapter

SIZES = {"num_streams": 3, "num_msa_layers": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_base(tmp_path_factory.mktemp("base"))


def stream_logits(base, **changes) -> torch.Tensor:
    config = paper_config(**SIZES, **changes)
    model = load_stream_model(base, random_adapter(base, config))
    ids = np.random.default_rng(0).integers(3, 200, 14).astype(np.int32)
    return forward(model, make_batch([Document(ids, 6)], 3), main=False, early=False).streams


def test_rotation_is_multiplication_by_a_complex_phase():
    values = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    angles = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    as_complex = torch.complex(values[..., :4], values[..., 4:]) * torch.exp(1j * angles)[:, None]
    expected = torch.cat([as_complex.real, as_complex.imag], -1)
    torch.testing.assert_close(_rotate(values, angles), expected)


def test_value_rotation_replaces_the_embeddings(base):
    config = paper_config(**SIZES, value_rotation=0.2)
    assert "stream_embeddings" not in tensor_shapes(config, base.architecture)
    assert parameter_count(config, base.architecture)["stream_embeddings"] == 0
    small, large = stream_logits(base, value_rotation=0.01), stream_logits(base, value_rotation=0.5)
    assert (small - large).abs().max() > 1e-3


def test_all_keys_equals_no_limit(base):
    torch.testing.assert_close(stream_logits(base, stream_top_keys=14), stream_logits(base))
    assert (stream_logits(base, stream_top_keys=2) - stream_logits(base)).abs().max() > 1e-3


def test_streams_see_the_keys_their_position_attends_to_most(base):
    model = load_stream_model(base, random_adapter(base, paper_config(**SIZES, stream_top_keys=2)))
    mask = torch.ones(1, 5, 5, dtype=torch.bool).tril()
    rows = Rows(torch.zeros(1, 5, 32), torch.arange(5)[None], mask, None, torch.tensor([[0, 3]]))
    scores = torch.full((1, 2, 2, 5, 5), -math.inf)
    scores[..., 0, 0] = 1.0
    scores[0, 0, 0, 3, :4] = torch.tensor([5.0, 1.0, 7.0, 2.0])
    scores[0, 1, 1, 3, :4] = torch.tensor([0.0, 9.0, -1.0, 8.0])
    visible = model._visible_to_streams(rows, scores)
    assert visible[0, 0, 0].tolist() == [[True] + [False] * 4, [True, False, True, False, False]]
    assert visible[0, 1, 1, 1].tolist() == [False, True, False, True, False]


def test_too_large_a_turn_is_refused():
    with pytest.raises(UserError, match="more than π/2"):
        paper_config(**SIZES, value_rotation=0.6)
