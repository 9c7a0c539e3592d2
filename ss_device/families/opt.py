"""OPT: learned positions, LayerNorm, biases everywhere, a plain ReLU feed-forward block."""

from __future__ import annotations

from ss_device.architecture import Architecture
from ss_device.families.checkpoint_names import CheckpointNames
from ss_device.families.config_reading import activation, not_covered, refuse, sizes

NAMES = CheckpointNames(
    embed="model.decoder.embed_tokens",
    norm="model.decoder.final_layer_norm",
    positions="model.decoder.embed_positions",
    rotary=None,
    layers="model.decoder.layers",
    layer={
        "attn_norm": "self_attn_layer_norm",
        "mlp_norm": "final_layer_norm",
        "attn.q": "self_attn.q_proj",
        "attn.k": "self_attn.k_proj",
        "attn.v": "self_attn.v_proj",
        "attn.o": "self_attn.out_proj",
        "mlp.up": "fc1",
        "mlp.down": "fc2",
    },
)


def architecture(config: dict) -> Architecture:
    """Architecture of a `config.json`; OPT-350m's projection and post-norm are refused by name."""
    if config.get("word_embed_proj_dim", config["hidden_size"]) not in (None, config["hidden_size"]):
        raise not_covered(config, "word_embed_proj_dim")
    refuse(
        config,
        do_layer_norm_before=True,
        _remove_final_layer_norm=False,
        layer_norm_elementwise_affine=True,
    )
    biases = ("q", "k", "v", "o", "up", "down") if config.get("enable_bias", True) else ()
    return Architecture(
        **sizes(config),
        intermediate_size=config["ffn_dim"],
        norm_eps=1e-5,
        rope_theta=0.0,
        tied_head=bool(config.get("tie_word_embeddings", True)),
        activation=activation(config, "activation_function", "relu"),
        positions="learned",
        position_offset=2,
        norm="layer",
        norm_bias=True,
        biases=biases,
        gated_mlp=False,
    )
