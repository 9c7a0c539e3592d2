"""Pieces of a decoder as MIL operations: embedding, norm, projections, rotary positions, attention, MLP.

Rows are rank 2, [rows, features]; heads are [heads, rows, head_dim]. Everything is fp16, built as such:
no conversion pass decides a precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from coremltools.converters.mil import Builder as mb

from ss_convert.coreml.weights import ExportWeights
from ss_device.architecture import Architecture

# Adds something to a projection's output: (layer, name, input rows, output rows) → output rows.
Correction = Callable[[int, str, object, object], object]
ACTIVATIONS = {"silu": mb.silu}


@dataclass(frozen=True)
class Rotary:
    """Rotary rows [rows, head_dim]: cosine and sine for queries (scaled by 1/√head_dim) and keys."""

    query_cos: object
    query_sin: object
    key_cos: object
    key_sin: object


class Decoder:
    """Builds the base model's pieces into the function that is being built, each constant once."""

    def __init__(self, architecture: Architecture, weights: ExportWeights) -> None:
        self.architecture = architecture
        self.weights = weights
        self._constants: dict[str, object] = {}

    def constant(self, name: str, value: Callable[[], np.ndarray]):
        """A named constant, made when first asked for."""
        if name not in self._constants:
            self._constants[name] = mb.const(val=value(), name=name.replace(".", "_"))
        return self._constants[name]

    def weight(self, name: str):
        return self.constant(name, lambda: self.weights.base(name))

    def embed(self, tokens):
        """Token ids [n] → rows [n, h]."""
        return mb.gather(x=self.weight("embed.weight"), indices=tokens, axis=0)

    def head_rows(self, tokens):
        """The LM head's rows of some tokens: ids [n] → [n, h]."""
        name = "embed.weight" if self.architecture.tied_head else "head.weight"
        return mb.gather(x=self.weight(name), indices=tokens, axis=0)

    def head(self, rows):
        """Final-normed rows [n, h] → logits [n, V]."""
        name = "embed.weight" if self.architecture.tied_head else "head.weight"
        return mb.linear(x=rows, weight=self.weight(name))

    def norm(self, rows, name: str):
        """RMSNorm as LayerNorm of [x, -x]: its mean is zero, and no square overflows fp16."""
        gain = self.constant(f"{name}.pair", lambda: np.tile(self.weights.base(f"{name}.weight"), 2))
        pair = mb.concat(values=[rows, mb.mul(x=rows, y=np.float16(-1))], axis=-1)
        normed = mb.layer_norm(
            x=pair, axes=[-1], gamma=gain, epsilon=np.float16(self.architecture.norm_eps)
        )
        return split(normed, [self.architecture.hidden_size] * 2, axis=1)[0]

    def project(self, layer: int, name: str, rows, correction: Correction | None = None):
        """A layer's linear projection `q k v o gate up down` of rows [n, in] → [n, out]."""
        block = "attn" if name in "qkvo" else "mlp"
        out = mb.linear(x=rows, weight=self.weight(f"layers.{layer}.{block}.{name}.weight"))
        return out if correction is None else correction(layer, name, rows, out)

    def keys_values(self, layer: int, normed, rotary: Rotary, correction: Correction | None = None):
        """Rotated keys and values [n_kv, n, head_dim] of normed rows."""
        heads = self.architecture.num_kv_heads
        keys = split_heads(self.project(layer, "k", normed, correction), heads)
        values = split_heads(self.project(layer, "v", normed, correction), heads)
        return rotate(keys, rotary.key_cos, rotary.key_sin), values

    def queries(self, layer: int, normed, rotary: Rotary, correction: Correction | None = None):
        """Rotated, scaled queries [H, n, head_dim] of normed rows."""
        q = split_heads(self.project(layer, "q", normed, correction), self.architecture.num_heads)
        return rotate(q, rotary.query_cos, rotary.query_sin)

    def mlp(self, layer: int, normed, correction: Correction | None = None):
        """The gated feed-forward block of normed rows [n, h] → [n, h]."""
        gate = self.project(layer, "gate", normed, correction)
        gate = ACTIVATIONS[self.architecture.activation](x=gate)
        up = self.project(layer, "up", normed, correction)
        return self.project(layer, "down", mb.mul(x=gate, y=up), correction)


def low_rank(rows, down: np.ndarray, up: np.ndarray, scale: float = 1.0):
    """scale · up(down(rows)), no activation. down [r, in], up [out, r] in fp16."""
    scaled = up.astype(np.float32) * np.float32(scale)
    exact = np.array_equal(scaled.astype(np.float16).astype(np.float32), scaled)
    factor = scaled.astype(np.float16) if exact else up
    out = mb.linear(x=mb.linear(x=rows, weight=down), weight=factor)
    # A scale that is no power of two would round every weight; rounding the scale alone is closer.
    return out if exact else mb.mul(x=out, y=np.float16(scale))


def gather_rotary(table, positions):
    """Rows of `tables.rotary_table` at positions [n], in fp16: [n, 4·head_dim]."""
    return mb.cast(x=mb.gather(x=table, indices=positions, axis=0), dtype="fp16")


def split_rotary(rows) -> Rotary:
    """[n, 4·head_dim] → the four parts."""
    return Rotary(*split(rows, [rows.shape[1] // 4] * 4, axis=1))


def rotate(heads, cos, sin):
    """Rotary positions on [heads, n, head_dim]; cos and sin [n, head_dim], sine's first half negated."""
    half = heads.shape[-1] // 2
    first, second = split(heads, [half, half], axis=2)
    swapped = mb.concat(values=[second, first], axis=-1)
    return mb.add(x=mb.mul(x=heads, y=cos), y=mb.mul(x=swapped, y=sin))


def split_heads(rows, num_heads: int):
    """[n, heads·head_dim] → [heads, n, head_dim]."""
    n, width = rows.shape
    return mb.transpose(x=mb.reshape(x=rows, shape=[n, num_heads, width // num_heads]), perm=[1, 0, 2])


def attend(queries, keys, values, mask):
    """Grouped-query attention → [n, H·head_dim].

    queries [H, n, d] (scaled); keys, values [n_kv, S, d]; mask [n, S] additive. The heads of a group
    are stacked as rows of one product, so no key or value is repeated.
    """
    heads, n, d = queries.shape
    groups, slots, _ = keys.shape
    stacked = [groups, heads // groups * n, d]
    scores = mb.matmul(x=mb.reshape(x=queries, shape=stacked), y=keys, transpose_y=True)
    scores = mb.add(x=mb.reshape(x=scores, shape=[heads, n, slots]), y=mask)
    weights = mb.reshape(x=mb.softmax(x=scores, axis=-1), shape=[*stacked[:2], slots])
    out = mb.reshape(x=mb.matmul(x=weights, y=values), shape=[heads, n, d])
    return mb.reshape(x=mb.transpose(x=out, perm=[1, 0, 2]), shape=[n, heads * d])


def split(x, sizes: Sequence[int], axis: int) -> list:
    """Consecutive slices of `x` along `axis`."""
    begin, parts = [0] * len(x.shape), []
    for extent in sizes:
        size = list(x.shape)
        size[axis] = extent
        parts.append(mb.slice_by_size(x=x, begin=list(begin), size=size))
        begin[axis] += extent
    return parts
