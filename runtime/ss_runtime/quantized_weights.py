"""MLX's quantized weights: which modules of a checkpoint are quantized, how, and modules that hold them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ss_device.architecture import Architecture
from ss_device.base_model import weight_files
from ss_device.errors import UserError, one_line
from ss_device.families import canonical_parts

FACTORS = ("scales", "biases")


@dataclass(frozen=True)
class Packing:
    """MLX's affine quantization of one matrix: weights per scale, bits per weight."""

    group_size: int
    bits: int


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


def packings(arrays: dict, shapes: dict[str, tuple[int, ...]]) -> dict[str, Packing]:
    """Quantized modules of canonical arrays, by path. shapes: `Architecture.weight_shapes`.

    Group size and bits follow from the arrays' widths. Raises UserError where they do not fit.
    """
    found = {}
    for name in arrays:
        module, _, kind = name.rpartition(".")
        if kind != "scales":
            continue
        rows, width = shapes.get(f"{module}.weight", (0, 0))
        packed, scales = arrays[f"{module}.weight"].shape, arrays[name].shape
        if f"{module}.biases" not in arrays:
            raise UserError(f"base model: '{module}' has no '.biases' (not affine quantization)")
        if not width or packed[0] != rows or scales[0] != rows or width % scales[1]:
            raise UserError(f"base model: quantized '{module}' does not have the shape {(rows, width)}")
        found[module] = Packing(width // scales[1], packed[1] * 32 // width)
    return found


def make_room(model: nn.Module, modules: dict[str, Packing]) -> None:
    """Replace the named modules by quantized ones of the same kind; their weights are installed later."""
    for packing in set(modules.values()):
        chosen = {path for path, other in modules.items() if other == packing}
        nn.quantize(model, packing.group_size, packing.bits, class_predicate=_is_one_of(chosen))


def quantized_names(modules: Iterable[str]) -> set[str]:
    """Canonical names of the arrays of quantized modules."""
    return {f"{module}.{kind}" for module in modules for kind in ("weight", *FACTORS)}


def _is_one_of(paths: set[str]):
    return lambda path, module: path in paths
