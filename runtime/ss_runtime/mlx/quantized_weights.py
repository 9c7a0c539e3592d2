"""MLX's quantized weights, a checkpoint's own or made when a base is loaded, and modules that hold them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ss_device.architecture import Architecture
from ss_device.base_model import weight_files
from ss_device.errors import UserError, one_line
from ss_device.families import canonical_parts
from ss_device.packed_weights import FACTORS, Packing

# What a base can be quantized to when it is loaded: bits, MLX's mode, weights per scale by preference.
SCHEMES = {"4": (4, "affine", (64, 32)), "8": (8, "affine", (64, 32)), "mxfp4": (4, "mxfp4", (32,))}


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
    if any(name.endswith(f".{FACTORS[0]}") for name in base):
        raise UserError(f"quantization '{scheme}': the base's weights are quantized already")
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
