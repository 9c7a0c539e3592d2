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
from ss_device.checked_writing import checked_file
from ss_device.errors import UserError, one_line, printable
from ss_device.families import canonical_parts
from ss_device.packed_weights import FACTORS, dequantize, packings
from ss_device.strict_json import decode_object, typed

FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
TIED = ("head.weight", "head.scales", "head.biases")
BLOCK = 1 << 22
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4,
}  # fmt: skip
DTYPES = FLOATS | {"U32": "<u4", "U8": "|u1", "I64": "<i8", "I32": "<i4"}


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
        width = math.prod(self.shape[1:]) * self._itemsize
        count = self.shape[0] - start if stop is None else stop - start
        return StoredTensor(self.path, self.offset + start * width, self.dtype, (count, *self.shape[1:]))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self._itemsize

    @property
    def _itemsize(self) -> int:
        if self.dtype not in DTYPES:
            raise UserError(f"{self.path}: a tensor of type {self.dtype}, which is not supported")
        return np.dtype(DTYPES[self.dtype]).itemsize

    def raw(self) -> np.ndarray:
        """The tensor's bytes as they are in the file."""
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            values = np.fromfile(file, np.uint8, self.num_bytes)
        if values.size != self.num_bytes:
            raise UserError(f"{self.path}: not a readable safetensors file (it ends too early)")
        return values

    def read(self) -> np.ndarray:
        """The values, bfloat16 widened to float32."""
        if self.dtype == "BF16":
            return self._widened()
        return self.raw().view(DTYPES[self.dtype]).reshape(self.shape)

    def _widened(self) -> np.ndarray:
        """bfloat16 in float32, read piece by piece."""
        values, done = np.empty(math.prod(self.shape), "<u4"), 0
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            while done < values.size:
                piece = np.fromfile(file, "<u2", min(BLOCK, values.size - done))
                if not piece.size:
                    raise UserError(f"{self.path}: not a readable safetensors file (it ends too early)")
                values[done : done + piece.size] = piece
                done += piece.size
        values <<= 16
        return values.view("<f4").reshape(self.shape)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, from its header alone. UserError for a foreign file."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length < path.stat().st_size else b""
    except OSError as error:
        raise UserError(f"{path}: not a readable safetensors file ({one_line(error)})") from error
    foreign = f"{path}: not a readable safetensors file"
    header = decode_object(text, foreign)
    header.pop("__metadata__", None)
    room = path.stat().st_size - 8 - length
    tensors = {}
    for name, raw in header.items():
        entry = typed(HeaderEntry, raw, f"{foreign}: '{printable(name):.80}'")
        start, end = entry.data_offsets
        if not 0 <= start <= end <= room or end - start != entry.num_bytes:
            raise UserError(f"{foreign} ('{printable(name):.80}' does not lie in it, or it ends too early)")
        tensors[name] = StoredTensor(path, 8 + length + start, entry.dtype, entry.shape)
    return tensors


@dataclass(frozen=True)
class HeaderEntry:
    """What a safetensors header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """Bytes that shape and type take. UserError for a type that the format does not have."""
        if self.dtype not in BITS or min(self.shape, default=0) < 0:
            raise UserError(f"a tensor of type '{self.dtype}' and shape {self.shape}")
        return math.prod(self.shape) * BITS[self.dtype] // 8


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
    with checked_file(path) as file:
        file.write(_header(header))
        for name in shapes:
            file.write(np.ascontiguousarray(read(name), "<f2"))


def write_stored(path: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Write a safetensors file with the very bytes of stored tensors, one tensor at a time in memory."""
    header, end = {}, 0
    for name, tensor in stored.items():
        start, end = end, end + tensor.num_bytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    with checked_file(path) as file:
        file.write(_header(header))
        for tensor in stored.values():
            file.write(tensor.raw())


def _header(entries: dict) -> bytes:
    """Length and JSON text of a safetensors file's header; readers expect aligned data behind it."""
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def checkpoint_tensors(files: Sequence[Path], architecture: Architecture) -> dict[str, StoredTensor]:
    """Canonical name → place of a checkpoint's tensors; fused ones are split by their rows.

    Raises UserError for an unexpected name and a damaged file.
    """
    found: dict[str, StoredTensor] = {}
    for file in files:
        for name, stored in stored_tensors(file).items():
            try:
                parts = canonical_parts(architecture, name)
            except UserError as error:
                raise UserError(f"{file}: {error}") from error
            if stored.dtype not in DTYPES and parts:
                raise UserError(f"{file}: tensor '{name}' has the number format {stored.dtype}")
            for part in parts:
                if not (architecture.tied_head and part.name in TIED):
                    found[part.name] = stored.rows(part.start, part.stop)
    return found


def blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """An array's values in flat pieces, so that what is computed of them needs little memory."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, BLOCK):
        yield flat[start : start + BLOCK]


class CheckpointWeights(Mapping[str, np.ndarray]):
    """Canonical name → array, read from disk at every access and not kept.

    stored: `checkpoint_tensors`, or the tensors of a file with canonical names. MLX's quantized matrices
    (`packed`) are read as the float32 values they stand for. Raises UserError, when built, for a missing
    or unexpected tensor, a wrong shape or a number format that is not covered.
    """

    def __init__(self, stored: Mapping[str, StoredTensor], architecture: Architecture, where: str) -> None:
        self.stored = dict(stored)
        self._shapes = architecture.weight_shapes()
        self.packed = packings(self.stored, self._shapes, where)
        self._check(where)

    def _check(self, where: str) -> None:
        for name, shape in self._shapes.items():
            if name not in self.stored:
                raise UserError(f"{where}: tensor '{name}' is missing")
            if name.removesuffix(".weight") in self.packed:
                continue
            if self.stored[name].shape != shape:
                found = self.stored[name].shape
                raise UserError(f"{where}: tensor '{name}' has shape {found}, expected {shape}")
            if self.stored[name].dtype not in FLOATS:
                raise UserError(f"{where}: tensor '{name}' has the number format {self.stored[name].dtype}")
        factors = {f"{module}.{factor}" for module in self.packed for factor in FACTORS}
        if extra := sorted(set(self.stored) - set(self._shapes) - factors):
            raise UserError(f"{where}: unexpected tensor '{extra[0]}'")

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._shapes:
            raise KeyError(name)
        module = name.removesuffix(".weight")
        if name == module or module not in self.packed:
            return self.stored[name].read()
        scales, biases = (self.stored.get(f"{module}.{factor}") for factor in FACTORS)
        return dequantize(
            self.stored[name].read(), scales.read(), biases and biases.read(), self.packed[module]
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        return self._shapes[name]
