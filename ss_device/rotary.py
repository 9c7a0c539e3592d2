"""Rotary frequencies of an Architecture, for the back ends that compute their own tables."""

from __future__ import annotations

import numpy as np

from ss_device.architecture import Architecture, RopeScaling


def inverse_frequencies(architecture: Architecture, window: int | None, context: int) -> np.ndarray:
    """Angle per position of each rotated pair, float32 [rotated / 2].

    window: that of the layers in question (local layers may have their own theta, never scaled).
    context in tokens decides LongRoPE's factors once and for all: `long_factors` when it exceeds
    `original_positions`, else `short_factors`. Hugging Face switches in the middle of a text instead and
    drops its cache there; a fixed choice equals it for every text on the same side of the limit.
    """
    dims = architecture.rotated
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    powers = np.power(np.float32(architecture.rope_theta_of(window)), exponents)
    scaling = scaling_of(architecture, window)
    if scaling is None:
        return np.float32(1.0) / powers
    if scaling.kind == "longrope":
        factors = scaling.long_factors if context > scaling.original_positions else scaling.short_factors
        return np.float32(1.0) / (np.asarray(factors, np.float32) * powers)
    inverse = np.float32(1.0) / powers
    if scaling.kind == "linear":
        return inverse / np.float32(scaling.factor)
    return _llama3(inverse, scaling)


def attention_factor(architecture: Architecture, window: int | None) -> float:
    """What multiplies every cosine and sine (1 except for LongRoPE)."""
    scaling = scaling_of(architecture, window)
    return 1.0 if scaling is None else scaling.attention_factor


def scaling_of(architecture: Architecture, window: int | None) -> RopeScaling | None:
    """The scaling that acts on layers with this window."""
    local = window is not None and architecture.local_rope_theta is not None
    return None if local else architecture.rope_scaling


def _llama3(inverse: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3.1: short waves stay, long ones are stretched by `factor`, a ramp in between."""
    waves_in_context = np.float32(scaling.original_positions) * inverse / np.float32(2 * np.pi)
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    kept = np.clip((waves_in_context - low) / (high - low), 0, 1).astype(np.float32)
    return (1 - kept) * inverse / np.float32(scaling.factor) + kept * inverse
