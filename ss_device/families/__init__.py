"""Model families: config.json and weight names of each, mapped to Architecture and canonical names."""

from __future__ import annotations

from ss_device.architecture import Architecture
from ss_device.errors import UserError, one_line
from ss_device.families import gemma2, gemma3_text, llama, mistral, opt, phi, phi3, qwen2, qwen3
from ss_device.families.checkpoint_names import CheckpointNames, Part, fused_projections

__all__ = ["FAMILIES", "Part", "canonical_parts", "fused_projections", "names_of", "read_architecture"]

FAMILIES = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "phi": phi,
    "phi3": phi3,
    "opt": opt,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
}


def family_module(model_type: str):
    """The family's module; an unknown `model_type` is a UserError that lists the supported ones."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UserError(
            f"model type {model_type!r:.80} is not supported (supported: {', '.join(sorted(FAMILIES))})"
        )
    return FAMILIES[model_type]


def read_architecture(config: dict) -> Architecture:
    """Architecture of a Hugging Face `config.json` (as a dict).

    Raises UserError for a family or setting that is not covered, and for entries of other types or sizes.
    """
    family = family_module(config.get("model_type", ""))
    try:
        return Architecture.from_dict(family.architecture(config).to_dict())
    except KeyError as error:
        raise UserError(f"config.json: setting {error} is missing") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"config.json: a setting is of a wrong type or size ({one_line(error)})") from error


def names_of(architecture: Architecture) -> CheckpointNames:
    """The family's module paths."""
    return family_module(architecture.family).NAMES


def canonical_parts(architecture: Architecture, name: str) -> list[Part]:
    """The canonical tensors that a checkpoint's tensor `name` holds; [] for derived buffers."""
    return names_of(architecture).parts(name, architecture)
