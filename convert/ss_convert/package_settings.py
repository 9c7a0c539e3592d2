"""What all functions of a bundle's package have in common: sizes, weights, the graph's choices."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from ss_convert.coreml.options import GRAPH_CHOICES, PRESETS, CoreMLOptions
from ss_device.base_model import BaseFolder
from ss_device.bundle import Bundle
from ss_device.errors import UserError
from ss_device.strict_json import typed

DEFAULT_CONTEXT, DEFAULT_CHUNK, DEFAULT_NODES = 512, 64, 32


@dataclass(frozen=True)
class PackageSettings:
    """`CoreMLOptions` that adapters of one package share; None: not said.

    parts: number of packages, or `auto` until the `cuts` between them are chosen.
    """

    num_nodes: int | None = None
    context: int | None = None
    chunk: int | None = None
    weights: str | None = None
    embedding_weights: str | None = None
    sampling: bool | None = None
    layout: str | None = None
    attention: str | None = None
    head_split: int | None = None
    commit: str | None = None
    pad_state: bool | None = None
    parts: int | str | None = None
    cuts: tuple[int, ...] | None = None
    lora: str | None = None
    lora_rank: int | None = None
    preset: str | None = None

    def to_dict(self) -> dict:
        return asdict(self)

    def options(self) -> dict:
        """The choices that are fields of `CoreMLOptions`."""
        return {name: value for name, value in self.to_dict().items() if name != "parts"}


# How the options are called on the command line.
FLAGS = {"num_nodes": "--nodes", "chunk": "--prefill"}
# Choices that concern the packages alone; sizes are those of golden traces and other functions as well.
COREML_ONLY = (*GRAPH_CHOICES, "weights", "embedding_weights", "parts", "lora", "lora_rank", "sampling")


def flag_of(name: str) -> str:
    """The option that sets a field of `PackageSettings`."""
    return FLAGS.get(name, "--" + name.replace("_", "-"))


def resolve_settings(package: PackageSettings, base: BaseFolder) -> PackageSettings:
    """Every choice made: what the user said, else the preset's, else the defaults.

    Embedding and head are read row by row and are the most sensitive: int8 where the rest is compressed.
    """
    context = package.context or min(DEFAULT_CONTEXT, base.architecture.max_positions)
    weights = package.weights or "fp16"
    defaults = {
        "num_nodes": DEFAULT_NODES,
        "context": context,
        "chunk": min(DEFAULT_CHUNK, context),
        "weights": weights,
        "embedding_weights": "fp16" if weights == "fp16" else "int8",
        "sampling": False,
        "parts": 1,
        "cuts": (),
        "lora": "baked",
        "lora_rank": 0,
        **{name: getattr(CoreMLOptions, name) for name in GRAPH_CHOICES},
        **PRESETS.get(package.preset, {}),
    }
    said = {name: value for name, value in package.to_dict().items() if value is not None}
    return PackageSettings(**{**defaults, **said})


def settings_of_bundle(bundle: Bundle, package: PackageSettings) -> PackageSettings:
    """The settings of an existing bundle's packages; a choice that differs from it is refused by name."""
    raw = bundle.manifest.made.package
    if set(raw) != {f.name for f in fields(PackageSettings)}:
        raise UserError(f"{bundle.path}: made by another version of ss-convert; convert all adapters again")
    for name, value in package.to_dict().items():
        if value is not None and value != raw[name]:
            flag = flag_of(name)
            raise UserError(f"{bundle.path}: was made with {flag} {raw[name]}, not {value}; leave it out")
    made = typed(PackageSettings, raw, f"{bundle.path}: package")
    if (made.lora == "inputs") != bool(made.lora_rank):
        raise UserError(
            f"{bundle.path}: package: lora '{made.lora}' and lora_rank {made.lora_rank} contradict"
        )
    return made
