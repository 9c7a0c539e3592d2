"""Gemma 3 (text): Gemma 2 with normed queries and keys, no caps, local layers with their own theta."""

from __future__ import annotations

from ss_device.architecture import Architecture
from ss_device.families.checkpoint_names import QK_NORM, CheckpointNames
from ss_device.families.config_reading import FULL, SLIDING, refuse, rotary, windows
from ss_device.families.gemma2 import SANDWICH_LAYER, gemma

NAMES = CheckpointNames(layer=SANDWICH_LAYER | QK_NORM, rotary_by_layer_type=True)


def architecture(config: dict) -> Architecture:
    """Architecture of a `config.json`; a setting that is not covered is refused by name."""
    refuse(config, attn_logit_softcapping=None)
    pattern = config.get("sliding_window_pattern", 6)
    kinds = [SLIDING if (layer + 1) % pattern else FULL for layer in range(config["num_hidden_layers"])]
    by_type = config.get("rope_parameters") or {}
    full = {**(by_type.get(FULL) or {}), **(config.get("rope_scaling") or {})}
    local = by_type.get(SLIDING) or {}
    refuse({**local, "model_type": config["model_type"]}, rope_type="default")
    return Architecture(
        **gemma(config),
        **rotary(config, full, theta=1_000_000.0),
        local_rope_theta=float(local.get("rope_theta") or config.get("rope_local_base_freq") or 10000.0),
        qk_norm=True,
        logit_softcap=config.get("final_logit_softcapping"),
        windows=windows(config, kinds, config.get("sliding_window", 4096)),
    )
