"""A tiny random base of every family, with the settings that are easily got wrong.

Head sizes of 80 and 96, a vocabulary that is a multiple of nothing, three layers, windows shorter than the
texts, rotary scalings whose limits lie inside them, large epsilons, every bias there is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ss_device.base_model import BaseFolder, open_base
from tests.tiny_models import write_byte_tokenizer

VOCAB, CONTEXT = 307, 64
COMMON = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {"hidden_size": 36, "intermediate_size": 50, "num_key_value_heads": 2, "rms_norm_eps": 2e-3}
GEMMA = {**GROUPED, "num_key_value_heads": 1, "query_pre_attn_scalar": 40, "sliding_window": 6}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 300.0,
    "short_factor": [1.0 + 0.05 * i for i in range(36)],
    "long_factor": [2.0 + 0.2 * i for i in range(36)],
}


@dataclass(frozen=True)
class Case:
    """title: what people know the family as; settings: config.json beside COMMON.

    mutations: changes of Architecture, each of which some check must notice.
    """

    title: str
    model_type: str
    settings: dict
    mutations: dict[str, dict] = field(default_factory=dict)


CASES = {
    "llama3": Case(
        "Llama 3.x",
        "llama",
        {
            **GROUPED,
            "head_dim": 80,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 300.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        {"theta": {"rope_theta": 330.0}, "no scaling": {"rope_scaling": None}},
    ),
    "llama2": Case(
        "Llama 2, Vicuna, OpenLLaMA, SmolLM",
        "llama",
        {
            **GROUPED,
            "num_key_value_heads": 4,
            "hidden_size": 40,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5},
        },
        {"eps": {"norm_eps": 1e-3}, "no scaling": {"rope_scaling": None}},
    ),
    "mistral": Case(
        "Mistral",
        "mistral",
        {**GROUPED, "head_dim": 96, "sliding_window": 6},
        {"window": {"windows": (7, 7, 7)}, "theta": {"rope_theta": 9000.0}},
    ),
    "qwen2": Case(
        "Qwen2, Qwen2.5",
        "qwen2",
        {
            **GROUPED,
            "hidden_size": 320,
            "intermediate_size": 24,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
        {"bias": {"biases": ("q", "k")}, "window": {"windows": (None, 6, 6)}},
    ),
    "qwen3": Case(
        "Qwen3",
        "qwen3",
        {**GROUPED, "head_dim": 80, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        {"q/k norm": {"qk_norm": False}, "eps": {"norm_eps": 1e-3}},
    ),
    "phi": Case(
        "Phi-1.5",
        "phi",
        {
            "hidden_size": 320,
            "intermediate_size": 24,
            "layer_norm_eps": 2e-3,
            "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 300.0,
                "partial_rotary_factor": 0.4,
            },
        },
        {"head bias": {"head_bias": False}, "rotated part": {"rotary_dims": 40}},
    ),
    "phi3": Case(
        "Phi-3 (short LongRoPE)",
        "phi3",
        {
            **GROUPED,
            "hidden_size": 384,
            "intermediate_size": 24,
            "sliding_window": 9,
            "original_max_position_embeddings": CONTEXT,
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
        },
        {"window": {"windows": (10, 10, 10)}, "long": {"max_positions": 128, "rope_scaling": "long"}},
    ),
    "phi3-long": Case(
        "Phi-3 (long LongRoPE)",
        "phi3",
        {
            **GROUPED,
            "hidden_size": 384,
            "intermediate_size": 24,
            "original_max_position_embeddings": 8,
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
        },
        {"theta": {"rope_theta": 330.0}, "short": {"rope_scaling": "short"}},
    ),
    "opt": Case(
        "OPT",
        "opt",
        {"hidden_size": 320, "ffn_dim": 24, "word_embed_proj_dim": 320, "dropout": 0.0},
        {"offset": {"position_offset": 1}, "activation": {"activation": "silu"}},
    ),
    "gemma2": Case(
        "Gemma 2",
        "gemma2",
        {**GEMMA, "head_dim": 80, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0},
        {"window": {"windows": (7, None, 7)}, "soft cap": {"attention_softcap": None}},
    ),
    "gemma3_text": Case(
        "Gemma 3 (text)",
        "gemma3_text",
        {
            **GEMMA,
            "head_dim": 96,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 9000.0, "factor": 2.0},
            },
        },
        {"local theta": {"local_rope_theta": 330.0}, "gain": {"norm_offset": 0.0}},
    ),
}


def make_base(name: str, folder: Path, seed: int = 0) -> BaseFolder:
    """Write a case's random base (weights that float16 holds exactly) and open it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    case = CASES[name]
    config = AutoConfig.for_model(case.model_type, **{**COMMON, **case.settings})
    model = AutoModelForCausalLM.from_config(config)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            values = _values(path, tuple(parameter.shape), parameter.mean().item() < 0.5, rng)
            parameter.copy_(torch.from_numpy(values.astype(np.float16).astype(np.float32)))
    model.half().save_pretrained(folder)
    write_byte_tokenizer(folder)
    return open_base(folder)


def _values(path: str, shape: tuple[int, ...], around_zero: bool, rng: np.random.Generator) -> np.ndarray:
    """Values at which every part matters. Norm gains lie on a grid that stays exact when 1 is added."""
    if "norm" in path and path.endswith("weight"):
        return np.round(rng.uniform(-0.5, 0.5, shape) * 256) / 256 + (0 if around_zero else 1)
    if path.endswith("bias"):
        return rng.normal(0, 0.4, shape)
    if "embed" in path:
        return rng.normal(0, 0.7, shape)
    return rng.normal(0, 1.6 * shape[-1] ** -0.5, shape)
