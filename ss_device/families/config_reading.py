"""What the families' config.json files have in common: sizes, rotary scaling, windows, refusals."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ss_device.architecture import RopeScaling
from ss_device.errors import UserError

ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
FULL, SLIDING = "full_attention", "sliding_attention"
SCALINGS = {"default", "linear", "llama3", "longrope", "su"}


def refuse(config: dict, **only: object) -> None:
    """Raise UserError for a setting whose value is neither absent nor the only one covered."""
    for name, value in only.items():
        if config.get(name, value) not in (value, None):
            raise not_covered(config, name)


def not_covered(config: dict, name: str) -> UserError:
    return UserError(
        f"model type '{config['model_type']}': setting '{name}' = {config.get(name)!r} is not supported"
    )


def sizes(config: dict, head_dim: int | None = None, kv_heads: int | None = None) -> dict:
    """Settings that every family spells alike, as arguments of Architecture.

    head_dim, kv_heads: the family's default where the config names none (None: hidden_size / heads, and
    as many as heads).
    """
    _check_dropouts(config)
    if not config.get("quantization"):  # MLX's, which repeats it under the other name
        refuse(config, quantization_config=None)
    try:
        heads = config["num_attention_heads"]
        common = {
            "family": config["model_type"],
            "vocab_size": config["vocab_size"],
            "hidden_size": config["hidden_size"],
            "num_layers": config["num_hidden_layers"],
            "num_heads": heads,
            "num_kv_heads": config.get("num_key_value_heads", kv_heads) or heads,
            "max_positions": config["max_position_embeddings"],
        }
    except KeyError as error:
        raise UserError(f"config.json: setting '{error.args[0]}' is missing") from error
    eos = config.get("eos_token_id")
    return common | {
        "head_dim": config.get("head_dim") or head_dim or common["hidden_size"] // heads,
        "bos_id": config.get("bos_token_id"),
        "eos_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    }


def _check_dropouts(config: dict) -> None:
    """Raise UserError for a share of dropped features outside [0, 1): transformers trains with them."""
    for name, share in config.items():
        if not name.endswith(("dropout", "pdrop", "layerdrop")) or share is None:
            continue
        if type(share) not in (int, float) or not 0 <= share < 1:
            raise UserError(f"config.json: setting '{name}' = {share!r:.80} is not in [0, 1)")


def activation(config: dict, name: str, default: str) -> str:
    """Architecture's name of the activation that config setting `name` asks for."""
    wanted = config.get(name) or default
    if wanted not in ACTIVATION_NAMES:
        raise not_covered(config, name)
    return ACTIVATION_NAMES[wanted]


def bias_names(config: dict, **groups: str) -> tuple[str, ...]:
    """Projections with a bias: setting name = the projections it gives one, e.g. `mlp_bias="up down"`."""
    return tuple(p for name, group in groups.items() if config.get(name) for p in group.split())


def rotary(config: dict, parameters: dict | None = None, theta: float = 10000.0) -> dict:
    """rope_theta and rope_scaling as arguments of Architecture.

    parameters: the layers' own rotary settings; by default `rope_scaling` (old files) or
    `rope_parameters` (new ones). Raises UserError for a kind of scaling that is not covered.
    """
    if parameters is None:
        parameters = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in SCALINGS:
        source = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        raise UserError(
            f"model type '{config['model_type']}': setting '{source}' of type '{kind}' is not supported "
            f"(supported: {', '.join(sorted(SCALINGS))})"
        )
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or theta)
    return {"rope_theta": theta, "rope_scaling": _scaling(config, kind, parameters)}


def partial_rotary(config: dict, head_dim: int, default: float = 1.0) -> int:
    """How many features of each head are rotated."""
    parameters = config.get("rope_parameters") or {}
    share = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", default))
    return int(head_dim * share)


def _scaling(config: dict, kind: str, parameters: dict) -> RopeScaling | None:
    if kind == "default":
        return None
    original = config.get("original_max_position_embeddings") or parameters.get(
        "original_max_position_embeddings", config["max_position_embeddings"]
    )
    try:
        if kind == "linear":
            return RopeScaling("linear", factor=float(parameters["factor"]))
        if kind == "llama3":
            return RopeScaling(
                "llama3",
                factor=float(parameters["factor"]),
                low_freq_factor=float(parameters["low_freq_factor"]),
                high_freq_factor=float(parameters["high_freq_factor"]),
                original_positions=original,
            )
        return RopeScaling(
            "longrope",
            original_positions=original,
            short_factors=tuple(parameters["short_factor"]),
            long_factors=tuple(parameters["long_factor"]),
            attention_factor=_longrope_attention_factor(config, parameters, original),
        )
    except KeyError as error:
        raise UserError(f"config.json: rotary scaling '{kind}' lacks '{error.args[0]}'") from error


def _longrope_attention_factor(config: dict, parameters: dict, original: int) -> float:
    """√(1 + ln s / ln original), s the stretch of the context (LongRoPE, arXiv 2402.13753)."""
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    stretch = parameters.get("factor") or config["max_position_embeddings"] / original
    return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))


def windows(config: dict, layer_types: Iterable[str] | None, window: int | None) -> tuple[int | None, ...]:
    """Architecture.windows from the kind of every layer; `layer_types` of the config goes first."""
    kinds = list(config.get("layer_types") or layer_types or [])
    if unknown := sorted(set(kinds) - {FULL, SLIDING}):
        raise UserError(
            f"model type '{config['model_type']}': setting 'layer_types' has '{unknown[0]}', "
            f"which is not supported (supported: {FULL}, {SLIDING})"
        )
    if SLIDING not in kinds or window is None:
        return ()
    return tuple(window if kind == SLIDING else None for kind in kinds)
