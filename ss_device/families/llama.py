"""Llama (Llama 1-3, Vicuna, OpenLLaMA, SmolLM): RMSNorm, rotary positions, gated feed-forward."""

from __future__ import annotations

from ss_device.architecture import Architecture
from ss_device.families.checkpoint_names import CheckpointNames
from ss_device.families.config_reading import activation, bias_names, rotary, sizes

NAMES = CheckpointNames()


def architecture(config: dict) -> Architecture:
    """Architecture of a `config.json`; a setting that is not covered is refused by name."""
    return Architecture(
        **sizes(config),
        **rotary(config),
        intermediate_size=config["intermediate_size"],
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        activation=activation(config, "hidden_act", "silu"),
        biases=bias_names(config, attention_bias="q k v o", mlp_bias="gate up down"),
    )
