"""Constant tables of the graphs: rotary positions and which stream sees which."""

from __future__ import annotations

import numpy as np

from ss_convert.coreml.interface import MASKED
from ss_device.architecture import Architecture
from ss_device.config import SpeculativeConfig


def rotary_table(architecture: Architecture, num_positions: int) -> np.ndarray:
    """float32 [positions, 4·head_dim]: query cosine and sine, then key cosine and sine.

    The query half carries the attention scale 1/√head_dim, so that no rounded scale constant is
    needed. The first half of each sine is negated: rotate(x) = x·cos + swap_halves(x)·sine. Angles
    are rounded as in Hugging Face's rotary embedding (float32 throughout).
    """
    d = architecture.head_dim
    exponents = np.arange(0, d, 2, dtype=np.float32) / np.float32(d)
    inverse = np.float32(1.0) / np.power(np.float32(architecture.rope_theta), exponents)
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * inverse[None].astype(np.float32)
    cosine = np.concatenate([np.cos(angles), np.cos(angles)], axis=1)
    sine = np.concatenate([-np.sin(angles), np.sin(angles)], axis=1)
    scale = np.float32(d**-0.5)
    return np.concatenate([cosine * scale, sine * scale, cosine, sine], axis=1).astype(np.float32)


def stream_offsets(config: SpeculativeConfig) -> np.ndarray:
    """int32 [γ]: how far stream j's position lies behind its node's (METHOD: Streams)."""
    steps = np.arange(1, config.num_streams + 1, dtype=np.int32)
    return steps if config.stream_position == "shift" else np.zeros_like(steps)


def own_stream_mask(config: SpeculativeConfig, num_kept: int) -> np.ndarray:
    """fp16 [K·(1+γ), K·γ]: additive mask of the stream columns, rows as [main | streams].

    Stream (i, j) sees streams (i, j' ≤ j); main i sees its own streams with `main_attends_streams`
    (METHOD: Streams).
    """
    gamma = config.num_streams
    same_node = np.eye(num_kept, dtype=bool)
    lower = np.tril(np.ones((gamma, gamma), dtype=bool))
    main = np.kron(same_node, np.ones((1, gamma), dtype=bool)) & config.main_attends_streams
    visible = np.concatenate([main, np.kron(same_node, lower)], axis=0)
    return np.where(visible, 0.0, MASKED).astype(np.float16)


def main_stream_columns(config: SpeculativeConfig, num_kept: int) -> np.ndarray:
    """fp16 [K·(1+γ), K·γ]: 1 where a main row meets its own streams, what the gate acts on."""
    gamma = config.num_streams
    main = np.kron(np.eye(num_kept), np.ones((1, gamma)))
    return np.concatenate([main, np.zeros((num_kept * gamma, num_kept * gamma))]).astype(np.float16)
