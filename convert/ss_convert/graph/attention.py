"""Grouped-query attention: explicit products and softmax, head by head, or the fused operation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ss_convert.graph.operations import op
from ss_device.architecture import Architecture


def for_attention(architecture: Architecture, attention: str) -> Architecture:
    """The architecture with the scale of queries that this attention leaves to the graph.

    The fused operation divides by √head_dim itself; the explicit one finds the scale in the queries.
    """
    if not is_fused(architecture, attention):
        return architecture
    own = architecture.attention_scale
    left = 1.0 if own is None else own * math.sqrt(architecture.head_dim)
    return replace(architecture, attention_scale=left)


def is_fused(architecture: Architecture, attention: str) -> bool:
    """Whether the fused operation can be used: it knows no soft cap."""
    return attention == "fused" and architecture.attention_softcap is None


def attention_of(architecture: Architecture, attention: str):
    """The attention of this name: (queries, keys, values, mask, soft cap) → [H, n, d]."""
    if architecture.attention_softcap is None and attention in ("fused", "composite"):
        return fused_attention
    return attend_by_head if attention == "by-head" else attend


def fused_attention(queries, keys, values, mask, cap: None = None):
    """[H, n, d] × [n_kv, S, d] → [H, n, d]; for Core ML queries scaled by √d too little (`for_attention`).

    mask [n, S] additive. The heads of a group are stacked as rows, so no key or value is repeated.
    """
    heads, n, d = queries.shape
    groups = keys.shape[0]
    stacked = op.reshape(queries, shape=[groups, heads // groups * n, d])
    repeated = op.tile(mask, reps=[heads // groups, 1]) if heads > groups else mask
    repeated = op.expand_dims(repeated, axes=[0])
    out = op.attention(stacked, keys, values, repeated)
    return op.reshape(out, shape=[heads, n, d])


def attend(queries, keys, values, mask, cap: float | None = None):
    """Grouped-query attention → [H, n, d].

    queries [H, n, d] (scaled); keys, values [n_kv, S, d]; mask [n, S] additive; cap: soft cap of the
    scores. The heads of a group are stacked as rows of one product, so no key or value is repeated.
    """
    heads, n, d = queries.shape
    groups, slots, _ = keys.shape
    stacked = [groups, heads // groups * n, d]
    scores = op.matmul(op.reshape(queries, shape=stacked), keys, transpose_y=True)
    scores = soft_cap(op.reshape(scores, shape=[heads, n, slots]), cap)
    scores = op.add(scores, mask)
    weights = op.reshape(op.softmax(scores, axis=-1), shape=[*stacked[:2], slots])
    return op.reshape(op.matmul(weights, values), shape=[heads, n, d])


def attend_by_head(queries, keys, values, mask, cap: float | None = None):
    """The same with matrices of a single head (docs/platform.md, Neural Engine)."""
    heads, n, d = queries.shape
    groups, slots, _ = keys.shape

    def plane(rows, index: int, count: int):
        return op.squeeze(op.slice_by_size(rows, begin=[index, 0, 0], size=[1, count, d]), axes=[0])

    pairs = [(plane(keys, group, slots), plane(values, group, slots)) for group in range(groups)]
    mixed = []
    for head in range(heads):
        key, value = pairs[head // (heads // groups)]
        scores = soft_cap(op.matmul(plane(queries, head, n), key, transpose_y=True), cap)
        weights = op.softmax(op.add(scores, mask), axis=-1)
        mixed.append(op.expand_dims(op.matmul(weights, value), axes=[0]))
    return mixed[0] if heads == 1 else op.concat(mixed, axis=0)


def soft_cap(x, cap: float | None):
    """cap · tanh(x / cap)."""
    if cap is None:
        return x
    return op.mul(op.tanh(op.real_div(x, np.float16(cap))), np.float16(cap))
