"""MLX's quantized weights, a checkpoint's own or made when a base is loaded, and modules that hold them."""

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
# What a base can be quantized to when it is loaded: bits, MLX's mode, weights per scale by preference.
SCHEMES = {"4": (4, "affine", (64, 32)), "8": (8, "affine", (64, 32)), "mxfp4": (4, "mxfp4", (32,))}


@dataclass(frozen=True)
class Packing:
    """MLX's quantization of one matrix: weights per scale, bits per weight, `affine` or `mxfp4`."""

    group_size: int
    bits: int
    mode: str = "affine"


def quantize_base(
    base: dict[str, mx.array], architecture: Architecture, scheme: str | None
) -> dict[str, mx.array]:
    """Canonical arrays with every matrix (projections, embedding, head) quantized; None: as they are.

    Norms, biases and learned positions stay; so does, in whole, everything that belongs to adapters. Raises
    UserError for an unknown scheme or rows that no group size divides.
    """
    if scheme is None:
        return base
    if scheme not in SCHEMES:
        raise UserError(f"quantization '{scheme}' is not one of {', '.join(SCHEMES)}")
    bits, mode, sizes = SCHEMES[scheme]
    found = {}
    for name, array in base.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or array.ndim != 2 or module == "positions":
            found[name] = array
            continue
        size = next((s for s in sizes if array.shape[1] % s == 0), None)
        if size is None:
            raise UserError(f"'{name}': groups of {sizes[-1]} do not divide its rows of {array.shape[1]}")
        parts = mx.quantize(array, group_size=size, bits=bits, mode=mode)
        found |= dict(zip((name, f"{module}.scales", f"{module}.biases"), parts, strict=False))
        mx.eval(parts)
    return found


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
        mode = "affine" if f"{module}.biases" in arrays else "mxfp4"
        if mode == "mxfp4" and getattr(arrays[name], "dtype", None) != mx.uint8:
            raise UserError(f"base model: '{module}' has no '.biases' (neither affine nor mxfp4)")
        if not width or packed[0] != rows or scales[0] != rows or width % scales[1]:
            raise UserError(f"base model: quantized '{module}' does not have the shape {(rows, width)}")
        found[module] = Packing(width // scales[1], packed[1] * 32 // width, mode)
    return found


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


def coded_names(modules: dict[str, Packing]) -> set[str]:
    """Those among them that hold codes, which no cast may touch."""
    weights = {f"{module}.weight" for module in modules}
    return weights | {f"{m}.scales" for m, packing in modules.items() if packing.mode != "affine"}


def _is_one_of(paths: set[str]):
    return lambda path, module: path in paths
