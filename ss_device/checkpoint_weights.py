"""Canonical weights of a checkpoint, read from disk and written one tensor at a time.

safetensors files are read with plain reads instead of a memory map: mapped pages count as the process's
memory, and numpy has no bfloat16, which is widened to float32 here (exactly).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ss_device.architecture import Architecture
from ss_device.errors import UserError, one_line
from ss_device.families import canonical_parts

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "U32": "<u4", "I64": "<i8", "I32": "<i4"}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor's bytes lie: file, offset in bytes, safetensors dtype, shape."""

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]

    def rows(self, start: int, stop: int | None) -> StoredTensor:
        """Rows start..stop-1 (to the end if None): consecutive bytes, since rows come first."""
        if start == 0 and stop is None:
            return self
        width = math.prod(self.shape[1:]) * np.dtype(DTYPES[self.dtype]).itemsize
        count = self.shape[0] - start if stop is None else stop - start
        return StoredTensor(self.path, self.offset + start * width, self.dtype, (count, *self.shape[1:]))

    def read(self) -> np.ndarray:
        """The values, bfloat16 widened to float32."""
        count = math.prod(self.shape)
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            values = np.fromfile(file, DTYPES[self.dtype], count)
        if values.size != count:
            raise UserError(f"{self.path}: not a readable safetensors file (it ends too early)")
        if self.dtype == "BF16":
            values = (values.astype("<u4") << 16).view("<f4")
        return values.reshape(self.shape)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, from its header alone. UserError for a foreign file."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length < path.stat().st_size else None
        header.pop("__metadata__", None)
        tensors = {
            name: StoredTensor(path, 8 + length + e["data_offsets"][0], e["dtype"], tuple(e["shape"]))
            for name, e in header.items()
        }
        end = max((8 + length + e["data_offsets"][1] for e in header.values()), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({one_line(error)})") from error
    if end > path.stat().st_size:
        raise UserError(f"{path}: not a readable safetensors file (it ends too early)")
    return tensors


def write_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], np.ndarray]
) -> None:
    """Write a float16 safetensors file tensor by tensor: `read(name)` is called once for each.

    The library writes only what is in memory all at once.
    """
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # readers expect aligned data
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            read(name).astype("<f2", copy=False).tofile(file)


class CheckpointWeights(Mapping[str, np.ndarray]):
    """Canonical name → array, read from disk at every access and not kept.

    Fused tensors are split by reading their rows. Raises UserError, when built, for an unexpected name, a
    missing tensor, a wrong shape or a number format that is not covered.
    """

    def __init__(self, files: Sequence[Path], architecture: Architecture, where: str) -> None:
        self._stored: dict[str, StoredTensor] = {}
        for file in files:
            for name, stored in stored_tensors(file).items():
                self._take(name, stored, architecture)
        self._check(architecture.weight_shapes(), where)

    def _take(self, name: str, stored: StoredTensor, architecture: Architecture) -> None:
        try:
            parts = canonical_parts(architecture, name)
        except UserError as error:
            raise UserError(f"{stored.path}: {error}") from error
        if stored.dtype not in DTYPES and parts:
            raise UserError(f"{stored.path}: tensor '{name}' has the number format {stored.dtype}")
        for part in parts:
            if part.name.endswith((".scales", ".biases")):
                raise UserError(
                    f"{stored.path}: quantized weights ('{name}'); give the base in 16 or 32 bits here"
                )
            if not (part.name == "head.weight" and architecture.tied_head):
                self._stored[part.name] = stored.rows(part.start, part.stop)

    def _check(self, expected: dict[str, tuple[int, ...]], where: str) -> None:
        for name, shape in expected.items():
            if name not in self._stored:
                raise UserError(f"{where}: tensor '{name}' is missing")
            if self._stored[name].shape != shape:
                found = self._stored[name].shape
                raise UserError(f"{where}: tensor '{name}' has shape {found}, expected {shape}")
        if extra := sorted(set(self._stored) - set(expected)):
            raise UserError(f"{where}: unexpected tensor '{extra[0]}'")

    def __getitem__(self, name: str) -> np.ndarray:
        return self._stored[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        return self._stored[name].shape
