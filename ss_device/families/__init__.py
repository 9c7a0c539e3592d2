"""Model families: config.json and weight names of each, mapped to Architecture and canonical names."""

from __future__ import annotations

from ss_device.architecture import Architecture
from ss_device.errors import UserError
from ss_device.families import llama

FAMILIES = {"llama": llama}


def family_module(model_type: str):
    """The family's module; an unknown `model_type` is a UserError that lists the supported ones."""
    if model_type not in FAMILIES:
        raise UserError(
            f"model type '{model_type}' is not supported (supported: {', '.join(sorted(FAMILIES))})"
        )
    return FAMILIES[model_type]


def read_architecture(config: dict) -> Architecture:
    """Architecture of a Hugging Face `config.json` (as a dict)."""
    return family_module(config.get("model_type", "")).architecture(config)


def canonical_name(model_type: str, name: str) -> str | None:
    """Canonical name of a checkpoint's weight; None for buffers that are derived from the config."""
    return family_module(model_type).canonical_name(name)
