"""Architecture: one frozen description of a decoder that every back end builds from."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from ss_device.errors import UserError


@dataclass(frozen=True)
class Architecture:
    """A pre-norm decoder: sizes, norm, positions, feed-forward block, ties. Sizes in elements."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied_head: bool
    activation: str = "silu"
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def projection_shapes(self) -> dict[str, tuple[int, int]]:
        """(out, in) of a layer's linear projections, by canonical short name."""
        h, q, kv = (
            self.hidden_size,
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        )
        return {
            "q": (q, h),
            "k": (kv, h),
            "v": (kv, h),
            "o": (h, q),
            "gate": (self.intermediate_size, h),
            "up": (self.intermediate_size, h),
            "down": (h, self.intermediate_size),
        }

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical names and shapes of every base weight.

        `embed.weight`, `layers.{i}.attn_norm.weight`, `layers.{i}.attn.{q,k,v,o}.weight`,
        `layers.{i}.mlp_norm.weight`, `layers.{i}.mlp.{gate,up,down}.weight`, `norm.weight`,
        `head.weight` (absent when tied).
        """
        h = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab_size, h)}
        for layer in range(self.num_layers):
            shapes[f"layers.{layer}.attn_norm.weight"] = (h,)
            shapes[f"layers.{layer}.mlp_norm.weight"] = (h,)
            for name, shape in self.projection_shapes().items():
                block = "attn" if name in "qkvo" else "mlp"
                shapes[f"layers.{layer}.{block}.{name}.weight"] = shape
        shapes["norm.weight"] = (h,)
        if not self.tied_head:
            shapes["head.weight"] = (self.vocab_size, h)
        return shapes

    def num_parameters(self) -> int:
        total = 0
        for shape in self.weight_shapes().values():
            size = 1
            for extent in shape:
                size *= extent
            total += size
        return total

    def to_dict(self) -> dict:
        return asdict(self)

    @staticmethod
    def from_dict(raw: dict) -> Architecture:
        """Inverse of `to_dict`; unknown keys mean a newer format and are refused by name."""
        unknown = sorted(set(raw) - {f.name for f in fields(Architecture)})
        if unknown:
            raise UserError(f"architecture: unknown setting '{unknown[0]}'")
        return Architecture(**{**raw, "eos_ids": tuple(raw.get("eos_ids", ()))})
