"""Decoder layers that carry main rows and stream rows together.

Rows are 2-D, [R, hidden]: first the main rows, then the rows of streams. Both pass through the same
matrices at once, so weights are read once; what only streams have (adapter, LoRA) acts on their part.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ss_device.architecture import Architecture
from ss_device.config import SpeculativeConfig
from ss_runtime.kv_cache import write_rows

ATTENTION = ("q", "k", "v", "o")
FEED_FORWARD = ("gate", "up", "down")


@dataclass(frozen=True)
class Rows:
    """Where the rows of one pass stand.

    num_main: how many of the R rows are main rows, the rest are streams; cos, sin: float32 [R, 1,
    head_dim / 2] of their positions; mask: bool [R, C] over the key buffer; slot: int32 [1], the
    buffer slot of the first row.
    """

    num_main: int
    cos: mx.array
    sin: mx.array
    mask: mx.array
    slot: mx.array


def rotary_tables(positions: mx.array, head_dim: int, theta: float) -> tuple[mx.array, mx.array]:
    """cos and sin of every position's angles, float32 [R, 1, head_dim / 2]. positions: int [R]."""
    exponents = mx.arange(0, head_dim, 2).astype(mx.float32) / head_dim
    angles = positions.astype(mx.float32)[:, None, None] * mx.power(theta, -exponents)
    return mx.cos(angles), mx.sin(angles)


def rotate(heads: mx.array, rows: Rows) -> mx.array:
    """Rotary positions on [R, heads, head_dim], halves rotated against each other, in float32."""
    first, second = mx.split(heads.astype(mx.float32), 2, axis=-1)
    turned = [first * rows.cos - second * rows.sin, second * rows.cos + first * rows.sin]
    return mx.concatenate(turned, axis=-1).astype(heads.dtype)


class LowRank(nn.Module):
    """x → scale · b(a(x)); a [rank, in], b [out, rank]."""

    def __init__(self, outputs: int, inputs: int, rank: int, scale: float = 1.0):
        super().__init__()
        self.a = mx.zeros((rank, inputs))
        self.b = mx.zeros((outputs, rank))
        self.scale = scale

    def __call__(self, x: mx.array) -> mx.array:
        y = (x @ self.a.T) @ self.b.T
        return y if self.scale == 1.0 else self.scale * y


class AdaptedLinears(nn.Module):
    """Named projections of one block, with LoRA of all rows (`lora`) and of streams (`stream_lora`)."""

    def __init__(self, shapes: dict[str, tuple[int, int]], config: SpeculativeConfig, is_msa: bool):
        super().__init__()
        for name, (outputs, inputs) in shapes.items():
            self[name] = nn.Linear(inputs, outputs, bias=False)
        if rank := config.lora_rank:
            scale = config.lora_alpha / rank
            self.lora = {name: LowRank(*shape, rank, scale) for name, shape in shapes.items()}
        if is_msa and (rank := config.stream_lora_rank):
            scale = config.stream_lora_scale
            self.stream_lora = {name: LowRank(*shape, rank, scale) for name, shape in shapes.items()}

    def project(self, name: str, x: mx.array, num_main: int) -> mx.array:
        """Projection `name` of rows [R, in] → [R, out]; rows from `num_main` on are streams."""
        y = self[name](x)
        if "lora" in self:
            y = y + self["lora"][name](x)
        if "stream_lora" in self and num_main < x.shape[0]:
            streams = y[num_main:] + self["stream_lora"][name](x[num_main:])
            y = streams if num_main == 0 else mx.concatenate([y[:num_main], streams], axis=0)
        return y


class Attention(AdaptedLinears):
    """Grouped-query attention over a key/value buffer that the rows are first written into."""

    def __init__(self, architecture: Architecture, config: SpeculativeConfig, is_msa: bool):
        shapes = architecture.projection_shapes()
        super().__init__({name: shapes[name] for name in ATTENTION}, config, is_msa)
        self.architecture = architecture

    def __call__(self, x: mx.array, rows: Rows, kv: tuple[mx.array, mx.array]):
        """x [R, h] → ([R, h], buffers with the rows written at `rows.slot`)."""
        size, kv_heads = self.architecture.head_dim, self.architecture.num_kv_heads
        split = {"q": self.architecture.num_heads, "k": kv_heads, "v": kv_heads}
        q, k, v = (
            self.project(name, x, rows.num_main).reshape(-1, count, size) for name, count in split.items()
        )
        q, k = rotate(q, rows), rotate(k, rows)
        q, k, v = (part.transpose(1, 0, 2)[None] for part in (q, k, v))
        keys, values = write_rows(kv[0], k, rows.slot), write_rows(kv[1], v, rows.slot)
        mixed = mx.fast.scaled_dot_product_attention(q, keys, values, scale=size**-0.5, mask=rows.mask)
        mixed = mixed[0].transpose(1, 0, 2).reshape(x.shape[0], -1)
        return self.project("o", mixed, rows.num_main), (keys, values)


class FeedForward(AdaptedLinears):
    """Gated SiLU block; stream rows go through their adapter instead of it, or beside it."""

    def __init__(self, architecture: Architecture, config: SpeculativeConfig, is_msa: bool):
        shapes = architecture.projection_shapes()
        super().__init__({name: shapes[name] for name in FEED_FORWARD}, config, is_msa)
        self.streams_use_block = config.stream_mlp == "base"
        if is_msa and (rank := config.stream_adapter_rank):
            self.stream_adapter = LowRank(architecture.hidden_size, architecture.hidden_size, rank)

    def __call__(self, x: mx.array, num_main: int) -> mx.array:
        """Normalised rows [R, h] → [R, h] (METHOD: Modes, stream feed-forward)."""
        if num_main == x.shape[0]:
            return self.block(x, num_main)
        streams = self.adapt(x[num_main:])
        if self.streams_use_block:
            y = self.block(x, num_main)
            main, streams = y[:num_main], y[num_main:] + streams
        else:
            main = self.block(x[:num_main], num_main)
        return mx.concatenate([main, streams], axis=0) if num_main else streams

    def block(self, x: mx.array, num_main: int) -> mx.array:
        gate, up = self.project("gate", x, num_main), self.project("up", x, num_main)
        return self.project("down", nn.silu(gate) * up, num_main)

    def adapt(self, x: mx.array) -> mx.array:
        return self["stream_adapter"](x) if "stream_adapter" in self else mx.zeros_like(x)


class DecoderLayer(nn.Module):
    """One pre-norm layer. `is_msa`: it carries streams."""

    def __init__(self, architecture: Architecture, config: SpeculativeConfig, is_msa: bool):
        super().__init__()
        self.attn_norm = nn.RMSNorm(architecture.hidden_size, architecture.norm_eps)
        self.attn = Attention(architecture, config, is_msa)
        self.mlp_norm = nn.RMSNorm(architecture.hidden_size, architecture.norm_eps)
        self.mlp = FeedForward(architecture, config, is_msa)

    def __call__(self, x: mx.array, rows: Rows, kv: tuple[mx.array, mx.array]):
        """x [R, h] → ([R, h], the layer's buffers with the rows written)."""
        mixed, kv = self.attn(self.attn_norm(x), rows, kv)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x), rows.num_main), kv
