"""The settings of a bundle's packages with every choice made: by user, preset, bundle or default."""

from __future__ import annotations

from dataclasses import fields

from ss_convert.graph.options import PRESETS, GraphOptions
from ss_convert.settings import PackageSettings
from ss_device.base_model import BaseFolder
from ss_device.bundle import Bundle
from ss_device.errors import UserError
from ss_device.settings import flag_of
from ss_device.strict_json import typed


def resolve_settings(package: PackageSettings, base: BaseFolder) -> PackageSettings:
    """Every choice made: what the user said, else the preset's, else the defaults.

    Embedding and head are read row by row and are the most sensitive: int8 where the rest is compressed.
    """
    said = {name: value for name, value in package.to_dict().items() if value is not None}
    context = said.get("context", min(GraphOptions.context, base.architecture.max_positions))
    defaults = {
        **{f.name: f.default for f in fields(GraphOptions)},
        "context": context,
        "chunk": min(GraphOptions.chunk, context),
        "embedding_weights": "fp16" if said.get("weights", "fp16") == "fp16" else "int8",
        "parts": 1,
        **PRESETS.get(package.preset, {}),
    }
    defaults["coreai_cache"] = None  # follows the preset
    return PackageSettings(**{name: said.get(name, defaults[name]) for name in package.to_dict()})


def settings_of_bundle(bundle: Bundle, package: PackageSettings) -> PackageSettings:
    """The settings of an existing bundle's packages; a choice that differs from it is refused by name."""
    raw = bundle.manifest.made.package
    if set(raw) != set(package.to_dict()):
        raise UserError(f"{bundle.path}: made by another version of ss-convert; convert all adapters again")
    for name, value in package.to_dict().items():
        if value is not None and value != raw[name]:
            flag = flag_of(PackageSettings, name)
            raise UserError(f"{bundle.path}: was made with {flag} {raw[name]}, not {value}; leave it out")
    made = typed(PackageSettings, raw, f"{bundle.path}: package")
    if (made.lora == "inputs") != bool(made.lora_rank):
        raise UserError(
            f"{bundle.path}: package: lora '{made.lora}' and lora_rank {made.lora_rank} contradict"
        )
    return made
