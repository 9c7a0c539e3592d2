"""Which adapters can be inputs of one pair of functions (`--lora inputs`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ss_convert.settings import PackageSettings
from ss_device.adapter import Adapter
from ss_device.bundle import Bundle
from ss_device.config import SpeculativeConfig
from ss_device.errors import UserError

# As for states on the Neural Engine (docs/platform.md, Adapters as inputs).
RANK_MULTIPLE = 32


def with_lora_rank(package: PackageSettings, adapters: Sequence[Adapter]) -> PackageSettings:
    """The settings with the rank that LoRA inputs are padded to; UserError for what cannot be an input."""
    if package.lora != "inputs":
        if package.lora_rank:
            raise UserError("--lora-rank is for --lora inputs")
        return package
    if package.parts != 1:
        raise UserError("--lora inputs takes a decoder in one package; leave --parts out")
    for adapter in adapters:
        if adapter.config.mode != "shared":
            raise UserError(
                f"adapter '{adapter.app}' is {adapter.config.mode}: no LoRA on the base's rows, which "
                "is what --lora inputs passes; it is for adapters of the shared mode"
            )
    largest = max(adapter.config.lora_rank for adapter in adapters)
    rank = package.lora_rank or -(-largest // RANK_MULTIPLE) * RANK_MULTIPLE
    for adapter in adapters:
        if adapter.config.lora_rank > rank:
            raise UserError(
                f"adapter '{adapter.app}' has LoRA of rank {adapter.config.lora_rank}, the functions take "
                f"{rank} (--lora-rank)"
            )
    return replace(package, lora_rank=rank)


def check_shared_functions(planned: Sequence, into: Bundle | None) -> None:
    """Adapters that run through the same functions may differ in their tensors, not in their graph.

    planned: `planning.PlannedAdapter`. Raises UserError naming the first setting that differs.
    """
    if planned[0].options.lora != "inputs":
        return
    first = {**graph_settings(planned[0].adapter.config), **sizes(planned[0].options)}
    others = {p.app: {**graph_settings(p.adapter.config), **sizes(p.options)} for p in planned[1:]}
    for app, entry in (into.manifest.adapters if into else {}).items():
        if entry.coreml is not None:
            others[app] = {**graph_settings(entry.config), **sizes(entry.coreml)}
    for app, settings in others.items():
        for name, value in first.items():
            if settings[name] != value:
                raise UserError(
                    f"'{planned[0].app}' and '{app}' differ in {name} ({value}, {settings[name]}), "
                    "which inputs of the same functions cannot (--lora baked)"
                )


def graph_settings(config: SpeculativeConfig) -> dict:
    """Settings that the graph depends on: not the LoRA's own rank and scale, nor the host's bigram bias."""
    left_out = ("lora_rank", "lora_alpha", "bigram_rank", "bigram_shared")
    return {name: value for name, value in config.to_dict().items() if name not in left_out}


def sizes(functions) -> dict:
    """Sizes of `GraphOptions` or `StepFunctions` that an adapter could choose for itself."""
    return {"--keep": functions.num_kept, "--prune-over": functions.prune_over}
