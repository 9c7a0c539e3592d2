"""Base weights as a saved Core ML package holds them, decompressed by formulas of their own.

Independent of the graph builder's compression and of the executor's operations: only the reader of the
file is the executor's. It is what the reference decodes with to judge a compressed package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ss_convert.graph.compression import Quantized, Stored
from ss_convert.graph.weights import BaseWeights
from ss_device.architecture import Architecture
from ss_device.errors import UserError

HEAD_PART = "head_part_"


def stored_weights(
    packages: Path | Sequence[Path],
    function: str,
    weights: dict[str, np.ndarray],
    architecture: Architecture,
) -> dict[str, np.ndarray]:
    """Canonical base weights in float32 as one of its functions uses them, a step by its name.

    packages: the package, or those of all parts.
    weights: the base's own, rounded to fp16 where the package stores them uncompressed. Raises
    UserError when a constant of the package has another size than its weight.
    """
    packages = [packages] if isinstance(packages, Path) else list(packages)
    compressed = _all_constants(packages, function)
    _join_head(compressed, architecture)
    found = {}
    for name, values in weights.items():
        stored = compressed.pop(name.replace(".", "_"), None)
        if stored is None:
            stored = values.astype(np.float16).astype(np.float32)
        if stored.size != values.size:
            raise UserError(
                f"{packages[0]}: constant '{name}' has {stored.size} values, expected {values.size}"
            )
        found[name] = stored.reshape(values.shape)
    if compressed:
        raise UserError(f"{packages[0]}: compressed constant '{next(iter(compressed))}' is no base weight")
    return found


def _all_constants(packages: Sequence[Path], function: str) -> dict[str, np.ndarray]:
    """Compressed constants of all parts; one that stands in several must be the same in each."""
    found: dict[str, np.ndarray] = {}
    for package in packages:
        for name, values in decompressed_constants(package, function).items():
            if not np.array_equal(found.setdefault(name, values), values):
                raise UserError(f"{package}: constant '{name}' differs from that of an earlier part")
    return found


def _join_head(compressed: dict[str, np.ndarray], architecture: Architecture) -> None:
    """Replace a head stored in parts by the whole; a tied one must be the embedding over again."""
    parts = sorted((name for name in compressed if name.startswith(HEAD_PART)), key=_first_row)
    if not parts:
        return
    name = "embed_weight" if architecture.tied_head else "head_weight"
    head = np.concatenate([compressed.pop(part) for part in parts])
    whole = compressed.setdefault(name, head)
    if not np.array_equal(whole.reshape(-1), head.reshape(-1)):
        raise UserError(f"the parts of the head differ from constant '{name}'")


def _first_row(part: str) -> int:
    return int(part.removeprefix(HEAD_PART))


def decompressed_constants(package: Path, function: str) -> dict[str, np.ndarray]:
    """Value name → float32 array of every compressed constant of a function."""
    from ss_executor import load_package

    found, constants = {}, {}
    for operation in load_package(package).functions[function].block.operations:
        if operation.type == "const":
            constants[operation.outputs[0][0]] = operation.inputs["val"][0]
        elif operation.type.startswith("constexpr_"):
            sources = {key: arguments[0] for key, arguments in operation.inputs.items()}
            values = {k: (constants[s] if isinstance(s, str) else s).load() for k, s in sources.items()}
            found[operation.outputs[0][0]] = decompress(operation.type, values)
    return found


def compressed_weights(base: BaseWeights, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Canonical base weights in float32 after compression: what an asset is to compute with."""
    return {name: _dense(base.stored(name)).reshape(values.shape) for name, values in weights.items()}


def _dense(stored: Stored) -> np.ndarray:
    if isinstance(stored, np.ndarray):
        return stored.astype(np.float32)
    if isinstance(stored, Quantized):
        return decompress("constexpr_blockwise_shift_scale", {"data": stored.data, "scale": stored.scale})
    table = stored.table.reshape(stored.table.shape[0], 1, -1, 1)
    return decompress("constexpr_lut_to_dense", {"indices": stored.indices, "lut": table})


def decompress(operation: str, values: dict[str, np.ndarray]) -> np.ndarray:
    """The dense float32 array of one compressed constant (MIL: iOS 18 compression operations)."""
    if operation == "constexpr_blockwise_shift_scale":
        data, scale = values["data"].astype(np.float64), values["scale"].astype(np.float64)
        # Entry (i, j, …) belongs to block (i // size_0, j // size_1, …).
        index = np.ix_(*(_block_of(n, m) for n, m in zip(data.shape, scale.shape, strict=True)))
        return (data * scale[index]).astype(np.float32)
    if operation == "constexpr_lut_to_dense":
        indices, table = values["indices"].astype(np.int64), values["lut"]
        grid = np.ix_(*(_block_of(n, m) for n, m in zip(indices.shape, table.shape, strict=False)))
        return table[(*grid, indices, 0)].astype(np.float32)
    raise UserError(f"compressed constants of '{operation}' are not supported")


def _block_of(size: int, blocks: int) -> np.ndarray:
    """int [size]: the block that each of `size` neighbours belongs to."""
    return np.arange(size) * blocks // size
