"""Weights for MLX: base and adapter tensors under canonical names, in float16 safetensors files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ss_device import bundle
from ss_device.adapter import Adapter
from ss_device.bundle import BIGRAM_BIAS
from ss_device.checkpoint_weights import blocks, write_stored, write_tensors
from ss_device.errors import UserError


def write_base(weights: Mapping[str, np.ndarray], path: Path) -> None:
    """Write base weights (`Architecture.weight_shapes` names) in float16 (ARCHITECTURE.md).

    float16 sources are stored bit for bit, and so is everything of a checkpoint with MLX's quantized
    matrices. One tensor at a time is asked for and in memory. Raises UserError for a value that float16
    cannot hold.
    """
    if not getattr(weights, "packed", None):
        _save(weights, path)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_stored(path, weights.stored)


def write_adapter(adapter: Adapter, path: Path) -> None:
    """Write an adapter's tensors in float16 (ARCHITECTURE.md), but for a bigram bias that others share.

    Names are those of `ss_device.config.tensor_shapes`, and of `ss_device.lora_names` in shared mode.
    Raises UserError for a value that float16 cannot hold.
    """
    _save(own_tensors(adapter), path)


def own_tensors(adapter: Adapter) -> dict[str, np.ndarray]:
    """What stands in the adapter's own file."""
    own = {
        n: t for n, t in adapter.tensors.items() if not (adapter.config.bigram_shared and n in BIGRAM_BIAS)
    }
    return {**own, **adapter.lora_tensors()}


def shared_bigram_bias(adapter: Adapter) -> dict[str, np.ndarray]:
    """The factors of a bigram bias that was trained once for the base; {} for an own one or none."""
    return {name: adapter.tensors[name] for name in BIGRAM_BIAS} if adapter.config.bigram_shared else {}


def bigram_bias_file(adapter: Adapter) -> str | None:
    """Where a bundle holds a shared bigram bias: by its content, so equal ones are one file."""
    if not (tensors := shared_bigram_bias(adapter)):
        return None
    digest = hashlib.sha256()
    for name in BIGRAM_BIAS:
        digest.update(_half(name, tensors[name]).tobytes())
    return bundle.bigram_bias_file(digest.hexdigest()[:16])


def write_bigram_bias(adapter: Adapter, folder: Path) -> None:
    """Write a shared bigram bias into a bundle's folder, unless an adapter before brought the same."""
    name = bigram_bias_file(adapter)
    if name and not (folder / name).exists():
        _save(shared_bigram_bias(adapter), folder / name)


def _save(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    shape_of = getattr(tensors, "shape_of", None) or (lambda name: np.shape(tensors[name]))
    write_tensors(path, {name: shape_of(name) for name in tensors}, lambda n: _half(n, tensors[n]))


def _half(name: str, array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # reported below, with the tensor's name
        half = np.ascontiguousarray(array, dtype=np.float16)
    if not all(np.isfinite(piece).all() for piece in blocks(half)):
        raise UserError(f"tensor '{name}' has values that float16 cannot hold")
    return half
