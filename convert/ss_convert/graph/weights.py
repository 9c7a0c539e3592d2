"""The constants of the functions: base weights as they are stored, LoRA and the adapter's parts in fp16."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ss_convert.graph.compression import Stored, compress
from ss_convert.graph.weight_format import weight_format_of
from ss_device.adapter import Adapter
from ss_device.architecture import Architecture
from ss_device.base_model import check_shapes
from ss_device.errors import UserError


class BaseWeights:
    """Canonical base weights as they are stored, each made once for all adapters.

    weights, embedding_weights: `WEIGHT_FORMATS`, for matrices of the layers and for embedding and
    head. Norms and other vectors stay fp16.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: Mapping[str, np.ndarray],
        weight_format: str = "fp16",
        embedding_format: str = "fp16",
    ) -> None:
        check_shapes(weights, architecture.weight_shapes(), "base weights")
        self._tied = architecture.tied_head
        self._weights, self._shapes = weights, architecture.weight_shapes()
        self._formats = (weight_format, embedding_format)
        self._half: dict[str, np.ndarray] = {}
        self._stored: dict[str, Stored] = {}

    def name(self, name: str) -> str:
        """Where a weight is: a tied head is the embedding."""
        return "embed.weight" if name == "head.weight" and self._tied else name

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def half(self, name: str) -> np.ndarray:
        """A weight in fp16, as it was before compression; kept where it is stored so."""
        name = self.name(name)
        if self.weight_format(name) != "fp16":
            return to_half(name, self._weights[name])
        if name not in self._half:
            self._half[name] = to_half(name, self._weights[name])
        return self._half[name]

    def weight_format(self, name: str) -> str:
        """How a weight is stored."""
        name = self.name(name)
        return weight_format_of(name, self._shapes[name], self._formats)

    def stored(self, name: str) -> Stored:
        """A weight as the package holds it."""
        name = self.name(name)
        if name not in self._stored:
            self._stored[name] = compress(self.half(name), self.weight_format(name))
        return self._stored[name]


class PlainWeights:
    """Base weights by name, and no adapter."""

    def __init__(self, architecture: Architecture, weights: Mapping[str, np.ndarray] | BaseWeights) -> None:
        self._base = weights if isinstance(weights, BaseWeights) else BaseWeights(architecture, weights)

    def base(self, name: str) -> np.ndarray:
        """A base weight in fp16, e.g. `layers.3.attn.q.weight` [out, in]."""
        return self._base.half(name)

    def stored(self, name: str) -> Stored:
        """A base weight as the package holds it."""
        return self._base.stored(name)

    def lora(self, projection: str) -> tuple[np.ndarray, np.ndarray, float] | None:
        """a [rank, in], b [out, rank] and the scale of a projection's LoRA; None without."""
        return None


class ExportWeights(PlainWeights):
    """Base weights and one adapter's tensors by name.

    The shared mode's LoRA stays beside the base weights, as its own constants: the base is stored once
    for all adapters, and it may be compressed while LoRA is not.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: Mapping[str, np.ndarray] | BaseWeights,
        adapter: Adapter,
    ) -> None:
        super().__init__(architecture, weights)
        adapter.check_shapes(architecture)
        for name in adapter.lora:
            if f"{name}.weight" not in self._base:
                raise UserError(f"adapter '{adapter.app}': LoRA for unknown projection '{name}'")
        self._adapter = adapter

    def part(self, name: str) -> np.ndarray:
        """A tensor of the adapter (`config.tensor_shapes`)."""
        return to_half(name, self._adapter.tensors[name])

    def lora(self, projection: str) -> tuple[np.ndarray, np.ndarray, float] | None:
        factors = self._adapter.lora.get(projection)
        if factors is None:
            return None
        a, b = (to_half(f"{projection} (LoRA)", factor) for factor in factors)
        return a, b, self._adapter.config.lora_alpha / self._adapter.config.lora_rank


def to_half(name: str, array: np.ndarray) -> np.ndarray:
    """`array` in fp16; a value beyond its range is a UserError that names the tensor."""
    largest = float(np.max(np.abs(array), initial=0.0))
    if not largest <= float(np.finfo(np.float16).max):
        raise UserError(f"tensor '{name}' has a value of {largest:g}, beyond what fp16 holds")
    return np.ascontiguousarray(array, dtype=np.float16)
