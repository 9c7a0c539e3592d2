"""Where a family's Hugging Face model keeps its parts: in checkpoints and as PyTorch modules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ss_device.architecture import Architecture, block_of
from ss_device.errors import UserError

# One stored matrix that holds several projections, one under the other.
FUSED = {"attn.qkv": ("q", "k", "v"), "mlp.gate_up": ("gate", "up")}
# `scales` and `biases` stand beside the packed `weight` in MLX's quantized checkpoints.
KINDS = ("weight", "bias", "scales", "biases")

LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
QK_NORM = {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}


@dataclass(frozen=True)
class Part:
    """Rows start..stop-1 of a stored tensor are the canonical tensor `name`."""

    name: str
    start: int
    stop: int | None


@dataclass(frozen=True)
class CheckpointNames:
    """Module paths by canonical name. layer: paths below `<layers>.<index>`.

    rotary_by_layer_type: the rotary module is asked for `sliding_attention` or `full_attention`.
    """

    embed: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    positions: str | None = None
    rotary: str | None = "model.rotary_emb"
    rotary_by_layer_type: bool = False
    layers: str = "model.layers"
    layer: Mapping[str, str] = field(default_factory=lambda: LLAMA_LAYER)

    def parts(self, name: str, architecture: Architecture) -> list[Part]:
        """The canonical tensors that a stored tensor holds; [] for tables that follow from the config.

        Raises UserError for an unexpected name.
        """
        module, _, kind = name.rpartition(".")
        for candidate in (module, f"model.{module}"):  # some checkpoints were saved without the head
            canonical = self._canonical_module(candidate)
            if canonical is not None and kind in KINDS:
                return list(_parts(canonical, kind, architecture))
        if name.endswith(("rotary_emb.inv_freq", "self_attn.bias", "self_attn.masked_bias")):
            return []
        raise UserError(f"unexpected weight '{name}' in the checkpoint")

    def module(self, canonical: str) -> str:
        """Module path of a canonical one (`norm`, `layers.3.attn.q`, fused: `layers.3.attn.qkv`)."""
        if canonical.startswith("layers."):
            _, index, short = canonical.split(".", 2)
            return f"{self.layers}.{index}.{self.layer[short]}"
        return self._top()[canonical]

    def projections(self) -> tuple[str, ...]:
        """The layer's linear modules, canonical (`attn.q`, or `attn.qkv` where they are fused)."""
        return tuple(n for n in self.layer if n.startswith(("attn.", "mlp.")) and not n.endswith("_norm"))

    def _top(self) -> dict[str, str]:
        top = {"embed": self.embed, "norm": self.norm, "head": self.head}
        return top | ({"positions": self.positions} if self.positions else {})

    def _canonical_module(self, path: str) -> str | None:
        for canonical, module in self._top().items():
            if module == path:
                return canonical
        match = re.fullmatch(re.escape(self.layers) + r"\.(\d+)\.(.+)", path)
        for short, module in self.layer.items():
            if match and match[2] == module:
                return f"layers.{match[1]}.{short}"
        return None


def fused_projections(canonical: str) -> tuple[str, ...]:
    """Short names of the projections in a module: `attn.qkv` → q, k, v; `attn.q` → q."""
    return FUSED.get(canonical, (canonical.rpartition(".")[2],))


def _parts(module: str, kind: str, architecture: Architecture) -> Iterator[Part]:
    short = ".".join(module.split(".")[2:])
    if short not in FUSED:
        yield Part(f"{module}.{kind}", 0, None)
        return
    layer, start = module.removesuffix(f".{short}"), 0
    for name in FUSED[short]:
        rows = architecture.projection_shapes()[name][0]
        yield Part(f"{layer}.{block_of(name)}.{name}.{kind}", start, start + rows)
        start += rows
