"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and an optional window on the upper layers."""

from __future__ import annotations

from ss_device.architecture import Architecture
from ss_device.families.checkpoint_names import CheckpointNames
from ss_device.families.config_reading import FULL, SLIDING, activation, rotary, sizes, windows

NAMES = CheckpointNames()


def architecture(config: dict) -> Architecture:
    """Architecture of a `config.json`; a setting that is not covered is refused by name."""
    return Architecture(
        **sizes(config, kv_heads=32),
        **rotary(config),
        intermediate_size=config["intermediate_size"],
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        activation=activation(config, "hidden_act", "silu"),
        biases=("q", "k", "v"),
        windows=upper_windows(config),
    )


def upper_windows(config: dict) -> tuple[int | None, ...]:
    """`use_sliding_window`: layers from `max_window_layers` on have the window."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    layers = range(config["num_hidden_layers"])
    return windows(config, [SLIDING if layer >= first else FULL for layer in layers], window)
