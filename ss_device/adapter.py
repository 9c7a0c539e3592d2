"""Adapter folders: what ss-train writes and ss-convert reads (ARCHITECTURE.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ss_device.architecture import Architecture
from ss_device.base_model import BaseFolder, BaseIdentity, check_shapes
from ss_device.config import SpeculativeConfig, parameter_count, tensor_shapes
from ss_device.errors import UserError, printable
from ss_device.families import canonical_parts
from ss_device.files import read_tensors
from ss_device.hub import is_hub_id
from ss_device.lora_names import lora_tensors
from ss_device.names import check_base_name, check_name
from ss_device.old_names import TENSORS, adapter_entries, renamed
from ss_device.outputs import folder_in_one_go, holds_only
from ss_device.strict_json import read_json, typed
from ss_device.tree import BigramBias

FORMAT_VERSION = 1
CONFIG_FILE = "speculative_config.json"
TENSOR_FILE = "speculative.safetensors"
GOLDEN_PROMPTS = "golden_prompts.jsonl"
FILES = (
    CONFIG_FILE, TENSOR_FILE, GOLDEN_PROMPTS, "acceptance.csv",
    "adapter_config.json", "adapter_model.safetensors",
)  # fmt: skip


@dataclass(frozen=True)
class Adapter:
    """One application's adapter in memory.

    tensors: `config.tensor_shapes` names → float arrays. lora (shared mode): canonical projection
    (`layers.3.attn.q`) → (a [rank, in], b [out, rank]), unscaled; multiply b @ a by lora_alpha / lora_rank.
    record: how it was trained; rank_statistics: which rank was right at each depth.
    """

    app: str
    config: SpeculativeConfig
    base: BaseIdentity
    tensors: dict[str, np.ndarray]
    prompt_template: str
    stop_strings: tuple[str, ...] = ()
    max_tokens: int = 256
    lora: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    record: dict = field(default_factory=dict)
    rank_statistics: dict = field(default_factory=dict)

    def bigram_bias(self) -> BigramBias | None:
        """The bigram term in float32, None when `bigram_rank` is 0."""
        if not self.config.bigram_rank:
            return None
        return BigramBias(
            self.tensors["bigram.u"].astype(np.float32), self.tensors["bigram.v"].astype(np.float32)
        )

    def lora_tensors(self) -> dict[str, np.ndarray]:
        """The LoRA factors by name (`lora_names`), as a bundle stores them."""
        return lora_tensors(self.lora)

    def check_base(self, base: BaseFolder) -> None:
        """Raise UserError unless the adapter was trained on this base and tokenizer.

        A base with MLX's quantized weights is taken for a copy of that base where its sizes fit: its
        files, the tokenizer's among them, are others.
        """
        mine, theirs = self.base, base.identity
        if mine != theirs and base.is_packed:
            self.check_shapes(base.architecture)
            return
        if mine.sha256 != theirs.sha256:
            raise UserError(
                f"adapter '{self.app}' was trained on base '{mine.name}' (sha256 "
                f"{mine.sha256[:12]}…), this base is '{theirs.name}' (sha256 {theirs.sha256[:12]}…)"
            )
        if mine.tokenizer_sha256 != theirs.tokenizer_sha256:
            raise UserError(
                f"adapter '{self.app}' was trained with another tokenizer (sha256 "
                f"{mine.tokenizer_sha256[:12]}…) than that of base '{theirs.name}' "
                f"({theirs.tokenizer_sha256[:12]}…)"
            )
        self.check_shapes(base.architecture)

    def check_shapes(self, architecture: Architecture) -> None:
        """Raise UserError unless tensors match the settings and the base's sizes."""
        self.config.check(architecture)
        check_shapes(self.tensors, tensor_shapes(self.config, architecture), f"adapter '{self.app}'")
        for name, tensor in self.tensors.items():
            if not np.isfinite(tensor).all():
                raise UserError(f"adapter '{self.app}': tensor '{name}' holds numbers that are not finite")


def save_adapter(adapter: Adapter, architecture: Architecture, folder: Path) -> None:
    """Write an adapter without PEFT files; shared mode adds those with peft's own `save_pretrained`."""
    with folder_in_one_go(folder) as temporary:
        write_speculative_files(adapter, architecture, temporary)


def write_speculative_files(adapter: Adapter, architecture: Architecture, folder: Path) -> None:
    """Write speculative_config.json and speculative.safetensors (fp16) into an existing folder."""
    adapter.check_shapes(architecture)
    raw = {
        "format_version": FORMAT_VERSION,
        "app": adapter.app,
        "config": adapter.config.to_dict(),
        "base": adapter.base.to_dict(),
        "architecture": architecture.to_dict(),
        "prompt_template": adapter.prompt_template,
        "stop_strings": list(adapter.stop_strings),
        "max_tokens": adapter.max_tokens,
        "parameters": parameter_count(adapter.config, architecture),
        "record": adapter.record,
        "rank_statistics": adapter.rank_statistics,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(raw, indent=1) + "\n")
    half = {n: np.ascontiguousarray(t, dtype=np.float16) for n, t in adapter.tensors.items()}
    save_file(half, folder / TENSOR_FILE)


def load_adapter(folder: Path | str) -> Adapter:
    """Read an adapter folder. Every problem is a UserError that names the file and what is wrong."""
    folder = Path(folder)
    raw = read_json(folder / CONFIG_FILE)
    version = raw.get("format_version")
    if version != FORMAT_VERSION:
        raise UserError(
            f"{folder / CONFIG_FILE}: format version {version!r:.40}, this program reads {FORMAT_VERSION}"
        )
    entries = typed(AdapterFile, adapter_entries(raw), str(folder / CONFIG_FILE))
    check_name(entries.app, f"{folder / CONFIG_FILE}: application")
    check_base_name(entries.base.name, f"{folder / CONFIG_FILE}: base")
    return Adapter(
        app=entries.app,
        config=entries.config,
        base=entries.base,
        tensors=renamed(read_tensors(folder / TENSOR_FILE), TENSORS),
        prompt_template=entries.prompt_template,
        stop_strings=entries.stop_strings,
        max_tokens=entries.max_tokens,
        lora=_read_lora(folder, entries.config, entries.architecture),
        record=entries.record,
        rank_statistics=entries.rank_statistics,
    )


@dataclass(frozen=True)
class AdapterFile:
    """The entries of speculative_config.json."""

    format_version: int
    app: str
    config: SpeculativeConfig
    base: BaseIdentity
    prompt_template: str
    stop_strings: tuple[str, ...]
    max_tokens: int
    record: dict
    rank_statistics: dict
    architecture: Architecture
    parameters: dict

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UserError(f"max_tokens {self.max_tokens} must be at least 1")


def _read_lora(
    folder: Path, config: SpeculativeConfig, architecture: Architecture
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """PEFT's LoRA tensors by canonical projection name.

    architecture: the base's. LoRA of a fused matrix is LoRA of each of its projections with the same `a`.
    """
    if not config.lora_rank:
        return {}
    prefix, factors = "base_model.model.", {}
    for name, tensor in read_tensors(folder / "adapter_model.safetensors").items():
        module, _, factor = name.removeprefix(prefix).rpartition(".lora_")
        for part in canonical_parts(architecture, module + ".weight"):
            rows = slice(None) if factor.startswith("A") else slice(part.start, part.stop)
            pair = factors.setdefault(part.name.removesuffix(".weight"), {})
            pair[factor.removesuffix(".weight")] = tensor[rows]
    for key, pair in factors.items():
        if pair.keys() != {"A", "B"}:
            raise UserError(f"{folder}: LoRA of '{printable(key)}' is not two factors, lora_A and lora_B")
    return {key: (pair["A"], pair["B"]) for key, pair in factors.items()}


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter of `ss-train adapter` and nothing else."""
    return (folder / CONFIG_FILE).is_file() and holds_only(folder, FILES)


def find_adapter(name: str, models: Path) -> Path:
    """Folder of adapter `name` (a path or a name under `models/adapters`); UserError lists the known."""
    if (Path(name) / CONFIG_FILE).is_file():
        return Path(name)
    folder = models / "adapters" / name
    if (folder / CONFIG_FILE).is_file():
        return folder
    known = sorted(p.parent.name for p in (models / "adapters").glob(f"*/{CONFIG_FILE}"))
    raise UserError(f"unknown adapter '{name}' (found: {', '.join(known) or 'none'})")


def find_base(adapter: Adapter, models: Path) -> Path:
    """Folder of the adapter's base under `models/base`.

    UserError lists the bases found. A base that is on the hub is never fetched because an adapter's file
    says so: the user names it with --base.
    """
    name = adapter.base.name
    folder = models / "base" / name
    if not folder.is_dir():
        known = sorted(p.parent.name for p in (models / "base").glob("*/config.json"))
        hub = f" {name} to take it from the hub" if is_hub_id(name) else ""
        raise UserError(
            f"base model '{name}' of adapter '{adapter.app}' is not under "
            f"{models / 'base'} (found: {', '.join(known) or 'none'}); name it with --base{hub}"
        )
    return folder
