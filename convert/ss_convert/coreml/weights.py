"""The fp16 constants of one adapter's functions: base weights with LoRA merged in, and the parts."""

from __future__ import annotations

import numpy as np

from ss_device.adapter import Adapter
from ss_device.architecture import Architecture
from ss_device.base_model import check_shapes
from ss_device.errors import UserError


class ExportWeights:
    """Canonical base weights and an adapter's tensors, in fp16, by name.

    The shared mode's LoRA is merged in float32 before rounding: W + (alpha / rank) · b @ a.
    """

    def __init__(
        self, architecture: Architecture, weights: dict[str, np.ndarray], adapter: Adapter
    ) -> None:
        check_shapes(weights, architecture.weight_shapes(), "base weights")
        adapter.check_shapes(architecture)
        for name in adapter.lora:
            if f"{name}.weight" not in weights:
                raise UserError(f"adapter '{adapter.app}': LoRA for unknown projection '{name}'")
        self._tied = architecture.tied_head
        self._weights = weights
        self._adapter = adapter
        self._half: dict[str, np.ndarray] = {}

    def base(self, name: str) -> np.ndarray:
        """A base weight as the functions use it, e.g. `layers.3.attn.q.weight` [out, in]."""
        name = "embed.weight" if name == "head.weight" and self._tied else name
        if name not in self._half:
            merged = merge_lora(self._adapter, name, self._weights[name])
            self._half[name] = to_half(name, merged)
        return self._half[name]

    def part(self, name: str) -> np.ndarray:
        """A tensor of the adapter (`config.tensor_shapes`)."""
        return to_half(name, self._adapter.tensors[name])


def merge_lora(adapter: Adapter, name: str, weight: np.ndarray) -> np.ndarray:
    """`weight` in float32 with the adapter's LoRA for it, if there is one, added."""
    merged = weight.astype(np.float32)
    factors = adapter.lora.get(name.removesuffix(".weight"))
    if factors is None:
        return merged
    a, b = (f.astype(np.float32) for f in factors)
    return merged + np.float32(adapter.config.lora_alpha / adapter.config.lora_rank) * (b @ a)


def to_half(name: str, array: np.ndarray) -> np.ndarray:
    """`array` in fp16; a value beyond its range is a UserError that names the tensor."""
    largest = float(np.max(np.abs(array), initial=0.0))
    if not largest <= float(np.finfo(np.float16).max):
        raise UserError(f"tensor '{name}' has a value of {largest:g}, beyond what fp16 holds")
    return np.ascontiguousarray(array, dtype=np.float16)
