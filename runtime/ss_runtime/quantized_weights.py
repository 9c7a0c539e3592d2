"""MLX's quantized weights in the runtime: a checkpoint's arrays, and modules that hold them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ss_device.architecture import Architecture
from ss_device.base_model import weight_files
from ss_device.errors import UserError, one_line
from ss_device.families import canonical_parts
from ss_device.packed_weights import FACTORS, Packing, packings

__all__ = ["checkpoint_arrays", "make_room", "packings", "quantized_names"]


def checkpoint_arrays(path: Path, architecture: Architecture) -> dict[str, mx.array]:
    """A base folder's arrays under canonical names, quantized ones as `.weight`, `.scales`, `.biases`.

    Raises UserError for a damaged file or an unexpected name.
    """
    arrays: dict[str, mx.array] = {}
    for file in weight_files(path):
        try:
            stored = mx.load(str(file))
        except (RuntimeError, ValueError) as error:
            raise UserError(f"{file}: not a readable safetensors file ({one_line(error)})") from error
        for name, array in stored.items():
            for part in canonical_parts(architecture, name):
                if not (part.name.startswith("head.") and architecture.tied_head):
                    whole = part.start == 0 and part.stop is None
                    arrays[part.name] = array if whole else array[part.start : part.stop]
    return arrays


def make_room(model: nn.Module, modules: dict[str, Packing]) -> None:
    """Replace the named modules by quantized ones of the same kind; their weights are installed later."""
    for packing in set(modules.values()):
        chosen = {path for path, other in modules.items() if other == packing}
        nn.quantize(
            model, packing.group_size, packing.bits, mode=packing.mode, class_predicate=_is_one_of(chosen)
        )


def quantized_names(modules: Iterable[str]) -> set[str]:
    """Canonical names of the arrays of quantized modules."""
    return {f"{module}.{kind}" for module in modules for kind in ("weight", *FACTORS)}


def _is_one_of(paths: set[str]):
    return lambda path, module: path in paths
