"""Base model folders (Hugging Face layout): architecture, identity and canonical numpy weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ss_device.architecture import Architecture
from ss_device.checkpoint_weights import CheckpointWeights, checkpoint_tensors
from ss_device.errors import UserError
from ss_device.families import read_architecture
from ss_device.files import check_plain, sha256
from ss_device.hub import download_base, is_hub_id
from ss_device.names import inside
from ss_device.strict_json import read_json, typed

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class BaseIdentity:
    """What an adapter or a bundle remembers of its base: name and digests of weights and tokenizer."""

    name: str
    sha256: str
    tokenizer_sha256: str

    def to_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class BaseFolder:
    """A base model on disk. Weights are read on demand."""

    path: Path
    architecture: Architecture
    identity: BaseIdentity

    def stored_weights(self) -> CheckpointWeights:
        """Canonical name → array in the checkpoint's precision, read when asked for.

        bfloat16 and MLX's quantized matrices come as float32.

        Names and shapes are checked now; nothing stays in memory.
        """
        stored = checkpoint_tensors(weight_files(self.path), self.architecture)
        return CheckpointWeights(stored, self.architecture, str(self.path))

    @property
    def is_packed(self) -> bool:
        """Whether some matrices are quantized in MLX's way (mlx-community's checkpoints)."""
        return bool(self.stored_weights().packed)

    def weights(self) -> dict[str, np.ndarray]:
        """All of `stored_weights`, in memory."""
        return dict(self.stored_weights())


def open_base(path: Path | str) -> BaseFolder:
    """Read config, tokenizer and digests of a base folder, no tensor yet.

    path: a folder, else the name of one under `models/base`, else an id on the Hugging Face hub
    (`ss_device.hub`), which is then the base's name.
    Raises UserError that names what is missing: folder, config.json, weights or tokenizer.json.
    """
    path, name = locate_base(Path(path))
    check_plain(path)
    config = read_json(path / "config.json")
    try:
        architecture = read_architecture(config)
    except UserError as error:
        raise UserError(f"{path / 'config.json'}: {error}") from error
    tokenizer = path / "tokenizer.json"
    if not tokenizer.is_file():
        raise UserError(f"{path}: no tokenizer.json (a base model folder needs its tokenizer)")
    identity = BaseIdentity(name, sha256(*weight_files(path)), sha256(tokenizer))
    return BaseFolder(path, architecture, identity)


def locate_base(path: Path) -> tuple[Path, str]:
    """Folder and name of a base that was named by folder, by name alone, or by its id on the hub."""
    if path.is_dir():
        return path, path.name
    if len(path.parts) == 1 and (named := _under_models(path.name)) is not None:
        return named, named.name
    if not is_hub_id(path):
        raise UserError(f"{path}: no such base model folder")
    return download_base(str(path)), str(path)


def _under_models(name: str) -> Path | None:
    """`models/base/<name>` where it is there."""
    try:
        folder = models_folder() / "base" / name
    except UserError:
        return None
    return folder if folder.is_dir() else None


def weight_files(path: Path) -> list[Path]:
    """The folder's safetensors files, in name order; those of the index where there is one.

    Raises UserError for a missing shard. Pickled checkpoints are not read.
    """
    if (path / INDEX_FILE).is_file():
        index = typed(ShardIndex, read_json(path / INDEX_FILE), str(path / INDEX_FILE))
        names = sorted(set(index.weight_map.values()))
        files = [inside(path, name, str(path / INDEX_FILE)) for name in names]
        for file in files:
            if not file.is_file():
                raise UserError(f"{file}: no such file (a shard of {INDEX_FILE})")
    else:
        files = sorted(path.glob("model*.safetensors"))
    if not files:
        raise UserError(f"{path}: no model*.safetensors in the base model folder")
    return files


@dataclass(frozen=True)
class ShardIndex:
    """model.safetensors.index.json: the shard of every tensor."""

    weight_map: dict[str, str]
    metadata: dict | None = None


def check_shapes(
    tensors: Mapping[str, np.ndarray], expected: dict[str, tuple[int, ...]], where: str
) -> None:
    """Raise UserError unless names and shapes are exactly the expected ones."""
    shape_of = getattr(tensors, "shape_of", None) or (lambda name: tensors[name].shape)
    for name, shape in expected.items():
        if name not in tensors:
            raise UserError(f"{where}: tensor '{name}' is missing")
        if shape_of(name) != shape:
            raise UserError(f"{where}: tensor '{name}' has shape {shape_of(name)}, expected {shape}")
    extra = sorted(set(tensors) - set(expected))
    if extra:
        raise UserError(f"{where}: unexpected tensor '{extra[0]}'")


def models_folder() -> Path:
    """Where bases and adapters live: `$SS_MODELS`, `./models`, or `models` beside this package."""
    candidates = [Path("models"), Path(__file__).resolve().parent.parent / "models"]
    if os.environ.get("SS_MODELS"):
        candidates.insert(0, Path(os.environ["SS_MODELS"]))
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise UserError("no folder 'models' found (set SS_MODELS or name base and adapter by path)")
