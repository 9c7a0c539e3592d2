"""Names of LoRA tensors: what is made is parsed again, and nothing else is."""

from __future__ import annotations

import pytest

from ss_device.architecture import Architecture
from ss_device.errors import UserError
from ss_device.lora_names import lora_name, lora_shapes, lora_tensors, parse_lora_name, split_lora
from tests.tiny_models import make_tiny_base


def test_a_name_is_taken_apart_again():
    assert lora_name("layers.3.attn.q", "a") == "lora.layers.3.attn.q.a"
    assert parse_lora_name("lora.layers.3.attn.q.a") == ("layers.3.attn.q", "a")


@pytest.mark.parametrize(
    "name", ["stream_lora.0.q.a", "lora.layers.3.attn.q.c", "stream_embeddings", "lora"]
)
def test_other_names_are_no_lora(name):
    assert parse_lora_name(name) is None
    assert split_lora({name: 1}) == ({name: 1}, {})


def test_factors_are_split_off_again():
    factors = {"layers.0.attn.q": (1, 2), "layers.0.mlp.up": (3, 4)}
    assert split_lora({"stream_embeddings": 0, **lora_tensors(factors)}) == (
        {"stream_embeddings": 0},
        factors,
    )


def test_a_missing_factor_is_named():
    with pytest.raises(UserError, match=r"tensor 'lora.layers.0.attn.q.b' is missing"):
        split_lora({"lora.layers.0.attn.q.a": 1})


def test_every_projection_of_every_layer_has_two_factors(tmp_path):
    architecture: Architecture = make_tiny_base(tmp_path).architecture
    shapes = lora_shapes(architecture, 5)
    assert len(shapes) == 2 * 7 * architecture.num_layers
    assert shapes["lora.layers.2.attn.k.a"] == (5, 32) and shapes["lora.layers.2.attn.k.b"] == (16, 5)
    assert shapes["lora.layers.0.mlp.down.a"] == (5, 48) and shapes["lora.layers.0.mlp.down.b"] == (32, 5)
