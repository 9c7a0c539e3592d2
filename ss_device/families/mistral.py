"""Mistral: Llama with a sliding window on every layer (version 0.1; later ones have none)."""

from __future__ import annotations

from ss_device.architecture import Architecture
from ss_device.families.checkpoint_names import CheckpointNames
from ss_device.families.config_reading import SLIDING, activation, refuse, rotary, sizes, windows

NAMES = CheckpointNames()


def architecture(config: dict) -> Architecture:
    """Architecture of a `config.json`; a setting that is not covered is refused by name."""
    refuse(config, layer_types=None)
    return Architecture(
        **sizes(config, kv_heads=8),
        **rotary(config),
        intermediate_size=config["intermediate_size"],
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        activation=activation(config, "hidden_act", "silu"),
        windows=windows(
            config, [SLIDING] * config["num_hidden_layers"], config.get("sliding_window", 4096)
        ),
    )
