"""Names of an adapter's LoRA tensors in files and functions: `lora.<projection>.a` and `.b`.

A projection is called by its canonical name, as in `lora.layers.3.attn.q.a` [rank, in] and
`lora.layers.3.attn.q.b` [out, rank], which are not yet multiplied by lora_alpha / lora_rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ss_device.architecture import Architecture, block_of
from ss_device.errors import UserError

PREFIX = "lora."
FACTORS = ("a", "b")


def lora_name(projection: str, factor: str) -> str:
    """The tensor's name: (`layers.3.attn.q`, `a`) → `lora.layers.3.attn.q.a`."""
    return f"{PREFIX}{projection}.{factor}"


def parse_lora_name(name: str) -> tuple[str, str] | None:
    """Projection and factor of a name that `lora_name` made; None for any other name."""
    projection, _, factor = name.removeprefix(PREFIX).rpartition(".")
    return (projection, factor) if name.startswith(PREFIX) and factor in FACTORS else None


def lora_tensors(factors: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Tensors by name from (a, b) by projection."""
    return {
        lora_name(projection, factor): tensor
        for projection, pair in factors.items()
        for factor, tensor in zip(FACTORS, pair, strict=True)
    }


def split_lora(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, Any]]]:
    """Other tensors by name, and (a, b) by projection. UserError naming a factor that is missing."""
    parsed = {name: parse_lora_name(name) for name in tensors}
    others = {name: tensor for name, tensor in tensors.items() if parsed[name] is None}
    pairs = {}
    for projection in dict.fromkeys(found[0] for found in parsed.values() if found is not None):
        names = [lora_name(projection, factor) for factor in FACTORS]
        if missing := [name for name in names if name not in tensors]:
            raise UserError(f"tensor '{missing[0]}' is missing")
        pairs[projection] = tuple(tensors[name] for name in names)
    return others, pairs


def lora_shapes(architecture: Architecture, rank: int) -> dict[str, tuple[int, int]]:
    """Name → shape of LoRA of this rank on every projection, layer by layer."""
    return {
        lora_name(f"layers.{layer}.{block_of(target)}.{target}", factor): shape
        for layer in range(architecture.num_layers)
        for target, (outputs, inputs) in architecture.projection_shapes().items()
        for factor, shape in zip(FACTORS, ((rank, inputs), (outputs, rank)), strict=True)
    }
