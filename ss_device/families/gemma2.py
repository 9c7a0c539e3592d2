"""Gemma 2: norms with gain 1 + w around every block, soft caps, a window on every second layer."""

from __future__ import annotations

import math

from ss_device.architecture import Architecture
from ss_device.families.checkpoint_names import LLAMA_LAYER, CheckpointNames
from ss_device.families.config_reading import (
    FULL,
    SLIDING,
    activation,
    bias_names,
    refuse,
    rotary,
    sizes,
    windows,
)

SANDWICH_LAYER = LLAMA_LAYER | {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
NAMES = CheckpointNames(layer=SANDWICH_LAYER)


def architecture(config: dict) -> Architecture:
    """Architecture of a `config.json`; a setting that is not covered is refused by name."""
    kinds = [FULL if layer % 2 else SLIDING for layer in range(config["num_hidden_layers"])]
    return Architecture(
        **gemma(config),
        **rotary(config),
        attention_softcap=config.get("attn_logit_softcapping", 50.0),
        logit_softcap=config.get("final_logit_softcapping", 30.0),
        windows=windows(config, kinds, config.get("sliding_window", 4096)),
    )


def gemma(config: dict) -> dict:
    """What Gemma 2 and 3 have in common, as arguments of Architecture."""
    refuse(config, use_bidirectional_attention=False)
    return sizes(config, head_dim=256, kv_heads=4) | {
        "intermediate_size": config["intermediate_size"],
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "tied_head": bool(config.get("tie_word_embeddings", True)),
        "activation": activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        "biases": bias_names(config, attention_bias="q k v o"),
        "norm_offset": 1.0,
        "sandwich_norms": True,
        "attention_scale": config.get("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_scale": math.sqrt(config["hidden_size"]),
    }
