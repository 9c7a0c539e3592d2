"""Qwen3: Qwen2 with normed queries and keys instead of biases."""

from __future__ import annotations

from ss_device.architecture import Architecture
from ss_device.families.checkpoint_names import LLAMA_LAYER, QK_NORM, CheckpointNames
from ss_device.families.config_reading import activation, bias_names, rotary, sizes
from ss_device.families.qwen2 import upper_windows

NAMES = CheckpointNames(layer=LLAMA_LAYER | QK_NORM)


def architecture(config: dict) -> Architecture:
    """Architecture of a `config.json`; a setting that is not covered is refused by name."""
    return Architecture(
        **sizes(config, head_dim=128, kv_heads=32),
        **rotary(config),
        intermediate_size=config["intermediate_size"],
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        activation=activation(config, "hidden_act", "silu"),
        biases=bias_names(config, attention_bias="q k v o"),
        qk_norm=True,
        windows=upper_windows(config),
    )
