"""Weights for MLX: base and adapter tensors under canonical names, in float16 safetensors files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ss_device.adapter import Adapter
from ss_device.errors import UserError


def write_base(weights: dict[str, np.ndarray], path: Path) -> None:
    """Write base weights (`Architecture.weight_shapes` names) in float16 (DESIGN: Bundle).

    float16 sources are stored bit for bit. Raises UserError for a value that float16 cannot hold.
    """
    _save(weights, path)


def write_adapter(adapter: Adapter, path: Path) -> None:
    """Write an adapter's tensors in float16 (DESIGN: Bundle).

    Names are those of `ss_device.config.tensor_shapes`; in shared mode also `lora.<projection>.a`
    [rank, in] and `.b` [out, rank], e.g. `lora.layers.3.attn.q.a`, not yet multiplied by lora_alpha /
    lora_rank. Raises UserError for a value that float16 cannot hold.
    """
    tensors = dict(adapter.tensors)
    for projection, (a, b) in adapter.lora.items():
        tensors[f"lora.{projection}.a"] = a
        tensors[f"lora.{projection}.b"] = b
    _save(tensors, path)


def _save(tensors: dict[str, np.ndarray], path: Path) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: _half(name, array) for name, array in tensors.items()}, path)


def _half(name: str, array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # reported below, with the tensor's name
        half = np.ascontiguousarray(array, dtype=np.float16)
    if not np.all(np.isfinite(half)):
        raise UserError(f"tensor '{name}' has values that float16 cannot hold")
    return half
