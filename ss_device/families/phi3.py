"""Phi-3 and Phi-3.5 mini: Llama with q, k, v and gate, up in one matrix each, LongRoPE, a window."""

from __future__ import annotations

from ss_device.architecture import Architecture
from ss_device.families.checkpoint_names import CheckpointNames
from ss_device.families.config_reading import SLIDING, activation, partial_rotary, rotary, sizes, windows

NAMES = CheckpointNames(
    layer={
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attn.qkv": "self_attn.qkv_proj",
        "attn.o": "self_attn.o_proj",
        "mlp.gate_up": "mlp.gate_up_proj",
        "mlp.down": "mlp.down_proj",
    }
)


def architecture(config: dict) -> Architecture:
    """Architecture of a `config.json`; a setting that is not covered is refused by name."""
    config = {"original_max_position_embeddings": 4096, **config}
    common = sizes(config)
    return Architecture(
        **common,
        **rotary(config),
        intermediate_size=config["intermediate_size"],
        norm_eps=config.get("rms_norm_eps", 1e-5),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        activation=activation(config, "hidden_act", "silu"),
        rotary_dims=partial_rotary(config, common["head_dim"]),
        windows=windows(config, [SLIDING] * config["num_hidden_layers"], config.get("sliding_window")),
    )
