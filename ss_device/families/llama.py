"""Llama: RMSNorm, rotary positions, grouped-query attention, gated SiLU feed-forward."""

from __future__ import annotations

import re

from ss_device.architecture import Architecture
from ss_device.errors import UserError

_TOP = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.o_proj": "attn.o",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")


def architecture(config: dict) -> Architecture:
    """Architecture of a Llama `config.json`; a setting that is not covered is refused by name."""
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or rope
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise UserError(f"llama: rope scaling {scaling} is not supported")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise UserError(f"llama: setting '{name}' is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"llama: hidden_act '{config['hidden_act']}' is not supported")
    heads = config["num_attention_heads"]
    eos = config.get("eos_token_id")
    return Architecture(
        family="llama",
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        max_positions=config["max_position_embeddings"],
        tied_head=bool(config.get("tie_word_embeddings", False)),
        bos_id=config.get("bos_token_id"),
        eos_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    )


def canonical_name(name: str) -> str | None:
    """Canonical name of a Llama checkpoint weight, None for derived buffers (rotary tables)."""
    if name in _TOP:
        return _TOP[name]
    match = _NAME.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"layers.{match[1]}.{_LAYER[match[2]]}.weight"
    if name.endswith("rotary_emb.inv_freq"):
        return None
    raise UserError(f"llama: unexpected weight '{name}' in the checkpoint")
