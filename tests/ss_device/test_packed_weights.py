"""MLX's quantized formats: the values that the formulas give are those of MLX's own kernels."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from ss_device import packed_weights
from ss_device.errors import UserError
from ss_device.packed_weights import Packing, dequantize, packings

MODES = [
    Packing(64, 4),
    Packing(64, 8),
    Packing(32, 2),
    Packing(64, 3),
    Packing(64, 5),
    Packing(32, 6),
    Packing(32, 4, "mxfp4"),
    Packing(32, 8, "mxfp8"),
    Packing(16, 4, "nvfp4"),
]
SHAPE = (7, 192)


def packed(packing: Packing) -> dict[str, mx.array]:
    weights = np.random.default_rng(0).normal(0, 3, SHAPE).astype(np.float32)
    found = mx.quantize(mx.array(weights), packing.group_size, packing.bits, mode=packing.mode)
    return dict(zip(("weight", "scales", "biases"), found, strict=False))


@pytest.mark.parametrize("packing", MODES, ids=str)
def test_values_are_mlxs(packing, monkeypatch):
    arrays = packed(packing)
    monkeypatch.setattr(packed_weights, "AT_ONCE", 400)  # several blocks of rows
    ours = dequantize(
        *(np.array(arrays[n]) if n in arrays else None for n in ("weight", "scales", "biases")), packing
    )
    theirs = mx.dequantize(
        arrays["weight"],
        arrays["scales"],
        arrays.get("biases"),
        group_size=packing.group_size,
        bits=packing.bits,
        mode=packing.mode,
    )
    theirs = np.array(theirs.astype(mx.float32))
    assert ours.shape == SHAPE
    assert np.abs(ours - theirs).max() <= 1e-6 * np.abs(theirs).max()


@pytest.mark.parametrize("packing", MODES, ids=str)
def test_formats_are_told_by_their_tensors(packing):
    tensors = {f"a.{name}": array for name, array in packed(packing).items()}
    assert packings(tensors, {"a.weight": SHAPE}) == {"a": packing}


def test_what_does_not_fit_is_named():
    tensors = {f"a.{name}": array for name, array in packed(MODES[0]).items()}
    for change, message in (
        ({"a.scales": mx.zeros((7, 5))}, "quantized 'a' does not have the shape"),
        ({"a.scales": mx.zeros(7)}, "quantized 'a' does not have the shape"),
        ({"a.weight": None}, "quantized 'a' does not have the shape"),
        ({"a.biases": None}, "'a' is quantized in a way that is not supported"),
        (
            {"a.weight": tensors["a.weight"].view(mx.int32)},
            "'a.weight' is stored as int32, expected uint32",
        ),
        ({"a.scales": tensors["a.scales"].view(mx.int32)}, "'a.scales' is stored as int32, expected float"),
    ):
        changed = {n: t for n, t in (tensors | change).items() if t is not None}
        with pytest.raises(UserError, match=message):
            packings(changed, {"a.weight": SHAPE})
