"""Grouped-query attention: explicit products and softmax, or Core ML's fused operation."""

from __future__ import annotations

import math
from dataclasses import replace

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


def fused_attention(queries, keys, values, mask):
    """[H, n, d] × [n_kv, S, d] → [H, n, d]; queries scaled by √d too little (`for_attention`).

    mask [n, S] additive. The heads of a group are stacked as rows, so no key or value is repeated.
    """
    heads, n, d = queries.shape
    groups = keys.shape[0]
    stacked = op.reshape(queries, shape=[groups, heads // groups * n, d])
    repeated = op.tile(mask, reps=[heads // groups, 1]) if heads > groups else mask
    repeated = op.expand_dims(repeated, axes=[0])
    out = op.attention(stacked, keys, values, repeated)
    return op.reshape(out, shape=[heads, n, d])
