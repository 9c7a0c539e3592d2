"""Phi-1, Phi-1.5, Phi-2: LayerNorm, biases everywhere, partial rotary, attention and MLP in parallel."""

from __future__ import annotations

from ss_device.architecture import Architecture
from ss_device.families.checkpoint_names import CheckpointNames
from ss_device.families.config_reading import activation, partial_rotary, refuse, rotary, sizes

NAMES = CheckpointNames(
    norm="model.final_layernorm",
    layer={
        "attn_norm": "input_layernorm",
        "attn.q": "self_attn.q_proj",
        "attn.k": "self_attn.k_proj",
        "attn.v": "self_attn.v_proj",
        "attn.o": "self_attn.dense",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
    },
)


def architecture(config: dict) -> Architecture:
    """Architecture of a `config.json`; a setting that is not covered is refused by name."""
    refuse(config, qk_layernorm=False)
    common = sizes(config)
    return Architecture(
        **common,
        **rotary(config),
        intermediate_size=config["intermediate_size"],
        norm_eps=config.get("layer_norm_eps", 1e-5),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        activation=activation(config, "hidden_act", "gelu_new"),
        rotary_dims=partial_rotary(config, common["head_dim"], 0.5),
        norm="layer",
        norm_bias=True,
        biases=("q", "k", "v", "o", "up", "down"),
        head_bias=True,
        gated_mlp=False,
        parallel_residual=True,
    )
