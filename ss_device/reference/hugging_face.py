"""A Hugging Face causal LM's own modules under canonical names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import rotate_half

from ss_device.architecture import Architecture
from ss_device.base_model import BaseFolder
from ss_device.errors import UserError, library_errors
from ss_device.families import canonical_parts, fused_projections, names_of
from ss_device.families.config_reading import FULL, SLIDING
from ss_device.strict_json import read_json

NO_CODE = {"trust_remote_code": False, "use_safetensors": True}
"""For transformers: run no Python file of a model's folder, and read no pickle."""

SHARED_SETTINGS = {
    "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "layer_types", "rope_parameters",
    "rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "sliding_window_pattern",
    "_sliding_window_pattern",
}  # fmt: skip
"""Settings of models that are older spellings, or belong to all configs in some version of transformers."""

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def load_base(base: BaseFolder, dtype: str = "float32", device: torch.device | str = "cpu") -> nn.Module:
    """The base as a Hugging Face model in evaluation mode on `device`, every parameter frozen.

    MLX's quantized matrices become the values they stand for, in `dtype`.
    """
    from transformers import AutoModelForCausalLM

    config = plain_config(base.path)
    if base.is_packed:
        return model_of(config, base.stored_weights(), base.architecture, dtype, device)
    with library_errors(f"{base.path}: transformers cannot load this base model"):
        model = AutoModelForCausalLM.from_pretrained(
            base.path, config=config, dtype=getattr(torch, dtype), **NO_CODE
        )
    return model.to(device).eval().requires_grad_(False)


def plain_config(folder: Path):
    """transformers' config of a model, from those entries of its config.json that shape the model.

    What transformers' configs have in common is left out: labels, outputs, generation, another library's
    quantization. It would make the model return or take something else, or more memory than there is.
    """
    from transformers import CONFIG_MAPPING

    raw = read_json(folder / "config.json")
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise UserError(f"{folder / 'config.json'}: model type {kind!r:.80} is unknown to transformers")
    with library_errors(f"{folder}: transformers cannot read this model's config"):
        config_class = CONFIG_MAPPING[kind]
        known = model_settings(config_class)
        return config_class(**{name: value for name, value in raw.items() if name in known})


def model_settings(config_class: type) -> frozenset[str]:
    """Names of the settings that shape the models of a config class, older spellings included."""
    from transformers import PretrainedConfig

    own = set(signature(config_class).parameters) - set(signature(PretrainedConfig).parameters)
    return frozenset(own | SHARED_SETTINGS) - {"use_cache"}


def model_of(
    config,
    weights: Mapping[str, np.ndarray],
    architecture: Architecture,
    dtype: str,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """A frozen Hugging Face model in evaluation mode with these canonical weights, asked for one by one."""
    from transformers import AutoModelForCausalLM

    with library_errors("transformers cannot build this base model"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False).to(getattr(torch, dtype))
        fill(model, weights, architecture)
    return model.to(device).eval().requires_grad_(False)


def fill(model: nn.Module, weights: Mapping[str, np.ndarray], architecture: Architecture) -> None:
    """Set every parameter of a Hugging Face model from canonical weights."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parts = [weights[part.name] for part in canonical_parts(architecture, name)]
            whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
            parameter.copy_(torch.from_numpy(whole))


def causal_lm(model: nn.Module) -> nn.Module:
    """The Hugging Face causal LM inside a PEFT wrapper, or the model itself."""
    return model.base_model.model if hasattr(model, "peft_config") else model


def lora_modules(architecture: Architecture) -> list[str]:
    """Names of a layer's linear modules, as PEFT's `target_modules` wants them."""
    names = names_of(architecture)
    return [names.layer[module].rpartition(".")[2] for module in names.projections()]


class Modules:
    """Modules of a causal LM by canonical name, also those that PEFT or quantization put in."""

    def __init__(self, model: nn.Module, architecture: Architecture) -> None:
        self._model = model
        self._names = names_of(architecture)
        self._architecture = architecture

    def __call__(self, name: str) -> nn.Module:
        """`embed`, `norm`, `head`, `layers.3.attn_norm`, `layers.3.attn.q_norm`, …"""
        return self._find(self._names.module(name))

    def project(self, index: int, block: str, x: torch.Tensor, only: str | None = None) -> dict:
        """Outputs of a layer's linear modules of `block` (`attn`, `mlp`) that read x, by short name.

        only: one projection (`o`, `down`); else all but these two, which read something else. One
        module may give several projections.
        """
        found = {}
        for module in self._names.projections():
            short = fused_projections(module)
            if module.startswith(block) and ((only in short) if only else not {"o", "down"} & set(short)):
                out = self(f"layers.{index}.{module}")(x)
                sizes = [self._architecture.projection_shapes()[name][0] for name in short]
                found |= dict(zip(short, out.split(sizes, -1), strict=True))
        return found

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Token ids and positions [B, T] → [B, T, h], learned positions and embedding scale included."""
        hidden = self("embed")(tokens)
        return hidden + self.learned(positions) if self._names.positions else hidden

    def learned(self, positions: torch.Tensor) -> torch.Tensor:
        """Rows of the table of learned positions; beyond its end the last one. [...] → [..., h]."""
        last = self._architecture.max_positions - 1
        return self("positions")(None, 0, positions.clamp(max=last))

    @property
    def rotates_by_length(self) -> bool:
        """Whether `rotate` needs the text's length (LongRoPE). Reading it waits for the device."""
        scaling = self._architecture.rope_scaling
        return scaling is not None and scaling.kind == "longrope"

    def rotate(self, q, k, positions: torch.Tensor, window: int | None, context: int | None):
        """q, k [B, H, T, D] turned by their positions [B, T]; as they are without rotary positions.

        context: the longest text in tokens; None where `rotates_by_length` says that it does not matter.
        """
        if self._names.rotary is None:
            return q, k
        cos, sin = (t[:, None] for t in self._cos_sin(q, positions, window, context))
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def _cos_sin(self, x, positions, window, context):
        module = self._find(self._names.rotary)
        kind = (FULL if window is None else SLIDING,) if self._names.rotary_by_layer_type else ()
        if not self.rotates_by_length:
            return module(x, positions, *kind)
        # Hugging Face picks LongRoPE's factors by the largest position of each call. One call with the
        # context's last position picks them; then its frequencies serve all positions.
        module(x, positions.new_full((1, 1), context - 1))
        angles = positions[..., None].float() * module.inv_freq.to(positions.device)
        angles = torch.cat([angles, angles], -1)
        return tuple((f(angles) * module.attention_scaling).to(x.dtype) for f in (torch.cos, torch.sin))

    def _find(self, path: str) -> nn.Module:
        return self._model.get_submodule(path)


def _rotate(x, cos, sin):
    """The first cos.shape[-1] features of each head rotated, halves against each other."""
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    return torch.cat([turned * cos + rotate_half(turned) * sin, rest], -1)
