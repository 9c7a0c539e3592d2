"""Decoder layers that carry main rows and stream rows together.

Rows are 2-D, [R, hidden]: first the main rows, then the rows of streams. Both pass through the same
matrices at once, so weights are read once; what only streams have (adapter, LoRA) acts on their part.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ss_device.architecture import ATTENTION, Architecture
from ss_device.config import SpeculativeConfig
from ss_runtime.mlx.kv_cache import Buffers, read_keys_values, write_keys_values
from ss_runtime.mlx.packed_rows import PackedRows


def silu(x: mx.array) -> mx.array:
    """x · sigmoid(x). One exponential and a quotient: on a CPU cheaper than a sigmoid, and no C++ compiler
    runs, as it does for `nn.silu`."""
    return nn.silu(x) if mx.default_device() == mx.gpu else x / (1 + mx.exp(-x))


ACTIVATIONS = {"silu": silu, "gelu": nn.gelu, "gelu_tanh": nn.gelu_approx, "relu": nn.relu}


@dataclass(frozen=True)
class View:
    """What layers with one window see of the rows of a pass.

    mask: bool [R, S], the first S slots of the key buffer; cos, sin: float32 [R, 1, rotated] of the rows'
    positions, sin negative in its first half (`rotate`), None with learned positions.
    """

    mask: mx.array
    cos: mx.array | None = None
    sin: mx.array | None = None


@dataclass(frozen=True)
class Rows:
    """Where the rows of one pass stand.

    num_main: how many of the R rows are main rows, the rest are streams; slot: int32 [1], the buffer slot
    of the first row; views: by the layers' window.
    """

    num_main: int
    slot: mx.array
    views: dict[int | None, View]


def rotary_tables(positions: mx.array, frequencies: mx.array, factor: float) -> tuple[mx.array, mx.array]:
    """cos and sin of every position's angles for `rotate`, times `factor`: float32 [R, 1, rotated].

    positions: int [R]; frequencies: float32 [rotated / 2] (`ss_device.rotary`).
    """
    angles = positions.astype(mx.float32)[:, None, None] * frequencies
    cos, sin = mx.cos(angles), mx.sin(angles)
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    return mx.concatenate([cos, cos], axis=-1), mx.concatenate([-sin, sin], axis=-1)


def rotate(heads: mx.array, view: View) -> mx.array:
    """Rotary positions on the first features of [R, heads, head_dim], halves turned in float32."""
    if view.cos is None:
        return heads
    rotated = view.cos.shape[-1]
    half = rotated // 2
    first, second = heads[..., :half], heads[..., half:rotated]
    swapped = mx.concatenate([second, first], axis=-1)
    straight = heads if rotated == heads.shape[-1] else heads[..., :rotated]
    turned = (straight * view.cos + swapped * view.sin).astype(heads.dtype)
    if rotated == heads.shape[-1]:
        return turned
    return mx.concatenate([turned, heads[..., rotated:]], axis=-1)


def soft_cap(x: mx.array, cap: float | None) -> mx.array:
    return x if cap is None else cap * mx.tanh(x / cap)


def attend(q, keys, values, mask: mx.array, scale: float, cap: float | None) -> mx.array:
    """Grouped-query attention: q [1, H, R, D], keys and values [1, n_kv, S, D] → [1, H, R, D].

    mask: bool [R, S], or [1, H, R, S] where heads see different keys. On a CPU the fused kernel is a
    composition too, with one product per head: here there is one per key head, and slots that nobody sees
    cost no exponential (their scores are −∞). Packed keys and values are multiplied as they are.
    """
    if cap is None and mx.default_device() == mx.gpu and isinstance(keys, mx.array):
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=mask)
    scores = attention_scores(q, keys, scale, cap)
    mask = mask if mask.ndim == 2 else mask.reshape(scores.shape)
    weights = mx.softmax(mx.where(mask, scores, -mx.inf), axis=-1, precise=True)
    weights = weights.reshape(1, keys.shape[1], -1, keys.shape[2])
    packed = isinstance(values, PackedRows)
    return (values.product(weights, transpose=False) if packed else weights @ values).reshape(q.shape)


def attention_scores(q, keys, scale: float, cap: float | None) -> mx.array:
    """Scaled, capped scores of q [1, H, R, D] at keys [1, n_kv, S, D]: [1, n_kv, H / n_kv, R, S]."""
    _, n_kv, size, width = keys.shape
    q, rows = (q * scale).reshape(1, n_kv, -1, width), q.shape[2]
    packed = isinstance(keys, PackedRows)
    scores = keys.product(q, transpose=True) if packed else q @ keys.swapaxes(-1, -2)
    return soft_cap(scores.reshape(1, n_kv, -1, rows, size), cap)


def rotate_values(values: mx.array, num_streams: int, turn: float) -> mx.array:
    """Values of streams [P·γ, n_kv, D], position by position, as D/2 complex numbers (halves); those of
    stream j turned by j · `turn` radians (v1 App. B, Eq. 7)."""
    angles = turn * mx.arange(1, num_streams + 1, dtype=mx.float32)
    angles = mx.tile(angles, values.shape[0] // num_streams)[:, None, None]
    real, imaginary = mx.split(values.astype(mx.float32), 2, axis=-1)
    cos, sin = mx.cos(angles), mx.sin(angles)
    turned = [real * cos - imaginary * sin, real * sin + imaginary * cos]
    return mx.concatenate(turned, axis=-1).astype(values.dtype)


def make_norm(architecture: Architecture, size: int | None = None) -> nn.Module:
    """One of the decoder's norms; with `size`, the RMSNorm of a head's features.

    `norm_offset` is part of the installed gain.
    """
    if size is None and architecture.norm == "layer":
        return nn.LayerNorm(architecture.hidden_size, architecture.norm_eps, bias=architecture.norm_bias)
    return nn.RMSNorm(size or architecture.hidden_size, architecture.norm_eps)


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

    def __init__(
        self, architecture: Architecture, config: SpeculativeConfig, is_msa: bool, names: list[str]
    ):
        super().__init__()
        shapes = {name: architecture.projection_shapes()[name] for name in names}
        for name, (outputs, inputs) in shapes.items():
            self[name] = nn.Linear(inputs, outputs, bias=name in architecture.biases)
        if rank := config.lora_rank:
            scale = config.lora_alpha / rank
            self.lora = {name: LowRank(*shape, rank, scale) for name, shape in shapes.items()}
        if is_msa and (rank := config.stream_lora_rank):
            scale = config.stream_lora_scale
            self.stream_lora = {name: LowRank(*shape, rank, scale) for name, shape in shapes.items()}
        self._merged: dict[str, mx.array] = {}  # transposed, [in, out]

    def merge_stream_lora(self, most: int) -> None:
        """Keep the streams' own matrix of every projection of at most `most` weights that has one.

        A pass of streams alone then takes one product where base and factors take three. Quantized
        matrices stay as they are. Weights must not change afterwards.
        """
        self._merged = {}
        for name, factors in self.get("stream_lora", {}).items():
            linear = self[name]
            if type(linear) is nn.Linear and linear.weight.size <= most:
                weight = linear.weight + factors.scale * (factors.b @ factors.a)
                if "lora" in self:
                    shared = self["lora"][name]
                    weight = weight + shared.scale * (shared.b @ shared.a)
                self._merged[name] = weight.T
        mx.eval(self._merged)

    @property
    def merged_bytes(self) -> int:
        """Memory of the streams' own matrices."""
        return sum(weight.nbytes for weight in self._merged.values())

    def project(self, name: str, x: mx.array, num_main: int) -> mx.array:
        """Projection `name` of rows [R, in] → [R, out]; rows from `num_main` on are streams."""
        if num_main == 0 and name in self._merged:
            y = x @ self._merged[name]
            return y + self[name].bias if "bias" in self[name] else y
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
        super().__init__(architecture, config, is_msa, list(ATTENTION))
        self.architecture = architecture
        self.num_streams = config.num_streams
        self.value_rotation, self.stream_top_keys = config.value_rotation, config.stream_top_keys
        if architecture.qk_norm:
            self.q_norm = make_norm(architecture, architecture.head_dim)
            self.k_norm = make_norm(architecture, architecture.head_dim)

    def __call__(self, x: mx.array, rows: Rows, view: View, kv: Buffers):
        """x [R, h] → ([R, h], buffers with the rows written at `rows.slot`)."""
        a = self.architecture
        split = {"q": a.num_heads, "k": a.num_kv_heads, "v": a.num_kv_heads}
        q, k, v = (
            self.project(name, x, rows.num_main).reshape(-1, count, a.head_dim)
            for name, count in split.items()
        )
        if a.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = mx.split(rotate(mx.concatenate([q, k], axis=1), view), [a.num_heads], axis=1)
        if self.value_rotation and rows.num_main < x.shape[0]:
            turned = rotate_values(v[rows.num_main :], self.num_streams, self.value_rotation)
            v = mx.concatenate([v[: rows.num_main], turned], axis=0)
        q, k, v = (part.transpose(1, 0, 2)[None] for part in (q, k, v))
        kv = write_keys_values(kv, k, v, rows.slot)
        mask = view.mask
        keys, values = read_keys_values(kv, mask.shape[1], a.head_dim)
        if 0 < self.stream_top_keys < mask.shape[1] and rows.num_main < x.shape[0]:
            mask = self._only_top_keys(q, keys, mask, rows)
        mixed = attend(q, keys, values, mask, a.query_scale, a.attention_softcap)
        mixed = mixed[0].transpose(1, 0, 2).reshape(x.shape[0], -1)
        return self.project("o", mixed, rows.num_main), kv

    def _only_top_keys(self, q: mx.array, keys, mask: mx.array, rows: Rows) -> mx.array:
        """The mask [R, C] by head, [1, H, R, C]: of the main keys, streams see those that their main row
        attends to most (v2 H.1). Equal scores at the limit are all seen: no order decides among them."""
        a, main = self.architecture, rows.num_main
        is_main_key = mx.arange(mask.shape[1]) < rows.slot + main
        scores = attention_scores(
            q[:, :, :main].astype(mx.float32), keys.astype(mx.float32), a.query_scale, a.attention_softcap
        )
        scores = mx.where(mask[:main] & is_main_key, scores, -mx.inf)
        limit = mx.min(mx.topk(scores, self.stream_top_keys, axis=-1), axis=-1, keepdims=True)
        seen = (scores >= limit).reshape(1, a.num_heads, main, -1)
        seen = mx.repeat(seen, self.num_streams, axis=2) | ~is_main_key
        of_main = mx.broadcast_to(mask[:main], (1, a.num_heads, *mask[:main].shape))
        return mx.concatenate([of_main, mask[main:] & seen], axis=2)


class FeedForward(AdaptedLinears):
    """Gated or plain block; stream rows go through their adapter instead of it, or beside it.

    post_norm: sandwich layers norm the block's output, not the adapter's.
    """

    def __init__(self, architecture: Architecture, config: SpeculativeConfig, is_msa: bool):
        names = [name for name in architecture.projection_shapes() if name not in ATTENTION]
        super().__init__(architecture, config, is_msa, names)
        self.act = ACTIVATIONS[architecture.activation]
        self.streams_use_block = config.stream_mlp == "base"
        if is_msa and (rank := config.stream_adapter_rank):
            self.stream_adapter = LowRank(architecture.hidden_size, architecture.hidden_size, rank)

    def __call__(self, x: mx.array, num_main: int, post_norm) -> mx.array:
        """Normalised rows [R, h] → [R, h] (docs/method.md, Streams)."""
        if num_main == x.shape[0]:
            return post_norm(self.block(x, num_main))
        streams = self.adapt(x[num_main:])
        if self.streams_use_block:
            y = post_norm(self.block(x, num_main))
            main, streams = y[:num_main], y[num_main:] + streams
        else:
            main = post_norm(self.block(x[:num_main], num_main)) if num_main else None
        return mx.concatenate([main, streams], axis=0) if num_main else streams

    def block(self, x: mx.array, num_main: int) -> mx.array:
        inner = self.act(self.project("gate" if "gate" in self else "up", x, num_main))
        if "gate" in self:
            inner = inner * self.project("up", x, num_main)
        return self.project("down", inner, num_main)

    def adapt(self, x: mx.array) -> mx.array:
        return self["stream_adapter"](x) if "stream_adapter" in self else mx.zeros_like(x)


class DecoderLayer(nn.Module):
    """One pre-norm layer with the norms and residuals of its architecture. `is_msa`: it carries streams."""

    def __init__(
        self, architecture: Architecture, config: SpeculativeConfig, is_msa: bool, window: int | None
    ):
        super().__init__()
        for name in architecture.norm_names():
            self[name] = make_norm(architecture)
        self.attn = Attention(architecture, config, is_msa)
        self.mlp = FeedForward(architecture, config, is_msa)
        self.window = window

    def __call__(self, x: mx.array, rows: Rows, kv: Buffers):
        """x [R, h] → ([R, h], the layer's buffers with the rows written)."""
        normed = self.attn_norm(x)
        mixed, kv = self.attn(normed, rows, rows.views[self.window], kv)
        x = x + self._post("attn_post_norm", mixed)
        if "mlp_norm" in self:  # without it the block runs beside attention, on the same norm
            normed = self.mlp_norm(x)
        return x + self.mlp(normed, rows.num_main, lambda y: self._post("mlp_post_norm", y)), kv

    def _post(self, name: str, y: mx.array) -> mx.array:
        return self[name](y) if name in self else y
