"""Several packages' functions in one package, at the level of the files.

coremltools' `save_multifunction` builds every function's program again with all its weights in memory.
Here functions are copied as they were written, only the offsets of their constants change: memory does
not grow with the model. Each function's description is made smaller on the way (`compact`), and equal
constants are stored once (`SharedWeights`).
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import BinaryIO

from coremltools.models.utils import save_spec
from coremltools.proto import MIL_pb2, Model_pb2
from google.protobuf.message import DecodeError

from ss_convert.coreml.reproducible import write_specification
from ss_device.errors import UserError, one_line

MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights"
WEIGHT_FILE = "weight.bin"


def merge_specs(
    sources: Mapping[str, tuple[Path, str]], default: str, metadata: Mapping[str, str], folder: Path
) -> Path:
    """Write `<folder>/merged.mlpackage` with the functions `sources`: name → (package, its function there).

    Equal constants, compressed or not, are stored once. default: the function that runs when none is
    named. metadata: what the package says of itself; that of the sources is dropped.
    """
    merged, weights = Model_pb2.Model(), folder / "weights"
    weights.mkdir()
    merged.mlProgram.version = 1
    merged.description.defaultFunctionName = default
    merged.description.metadata.userDefined.update(metadata)
    specs = {package: read_spec(package) for package, _ in sources.values()}
    with SharedWeights(weights / WEIGHT_FILE) as shared:
        for name, (package, function) in sources.items():
            spec = specs[package]
            merged.specificationVersion = max(merged.specificationVersion, spec.specificationVersion)
            merged.description.functions.append(_description(spec, function, name))
            program = merged.mlProgram.functions[name]
            program.CopyFrom(spec.mlProgram.functions[function])
            _move_constants(program, package / WEIGHTS, shared)
            compact(program)
    path = folder / "merged.mlpackage"
    save_spec(merged, str(path), weights_dir=str(weights))
    write_specification(merged, path)
    return path


def read_spec(package: Path) -> Model_pb2.Model:
    """The model in a package. coremltools' own reader writes the package's Manifest.json anew, and a bundle
    that is extended must stay as it is."""
    spec = Model_pb2.Model()
    try:
        spec.ParseFromString((package / MODEL).read_bytes())
    except (OSError, DecodeError) as error:
        raise UserError(f"{package}: not a readable Core ML package ({one_line(error)})") from error
    return spec


def _description(spec: Model_pb2.Model, function: str, name: str) -> Model_pb2.FunctionDescription:
    """What a package says of its function (that of a single one is not in a list), under a new name."""
    described = spec.description
    found = next((d for d in described.functions if d.name == function), None)
    made = Model_pb2.FunctionDescription()
    if found is not None:
        made.CopyFrom(found)
    else:
        for field in ("input", "output", "state"):
            getattr(made, field).extend(getattr(described, field))
    made.name = name
    return made


def _move_constants(function: MIL_pb2.Function, folder: Path, shared: SharedWeights) -> None:
    """Point a function's constants at their places in the shared file."""
    for name in sorted(function.block_specializations):
        for value in _values(function.block_specializations[name]):
            if value.HasField("blobFileValue"):
                blob = value.blobFileValue
                blob.offset = shared.add(folder / Path(blob.fileName).name, blob.offset)
                blob.fileName = f"@model_path/weights/{WEIGHT_FILE}"


def _values(block: MIL_pb2.Block) -> Iterator[MIL_pb2.Value]:
    """Every value that stands in a block's operations, those of nested blocks included.

    By name: the maps of a protocol buffer have another order in every process, and the order decides where
    a constant lies in the file.
    """
    for operation in block.operations:
        yield from (operation.attributes[name] for name in sorted(operation.attributes))
        for name in sorted(operation.inputs):
            for binding in operation.inputs[name].arguments:
                if binding.HasField("value"):
                    yield binding.value
        for nested in operation.blocks:
            yield from _values(nested)


# What coremltools calls a parameter that was given as a plain value: `linear_5_bias_0`.
GENERATED = re.compile(r"[a-z_]+_\d+_[a-z_]+_0$")


def compact(function: MIL_pb2.Function) -> None:
    """A function's description in fewer bytes: equal small constants once, short names inside.

    Without it half of a small package's `model.mlmodel` is names and the same axes, shapes and flags
    written for every operation anew. Names that say something stay: inputs, outputs, states, stored
    weights. Rewrites in place; operations, their order and all values stay what they are.
    """
    for name in sorted(function.block_specializations):
        block = function.block_specializations[name]
        kept = {feature.name for feature in function.inputs} | _fixed_names(block)
        numbers = (number for number in count() if f"v{number}" not in kept)
        _rewrite(block, kept, {}, {}, numbers)


def _fixed_names(block: MIL_pb2.Block) -> set[str]:
    """Outputs, inputs of nested blocks, and values whose bytes stand in the weight file."""
    fixed = set(block.outputs) | {value.name for value in block.inputs}
    for operation in block.operations:
        if _is_weight(operation):
            fixed.update(value.name for value in operation.outputs)
        for nested in operation.blocks:
            fixed |= _fixed_names(nested)
    return fixed


def _is_weight(operation: MIL_pb2.Operation) -> bool:
    """Whether a constant stands in the weight file under a name that the builder gave it."""
    if operation.type.startswith("constexpr_"):
        return True
    stored = operation.type == "const" and operation.attributes["val"].HasField("blobFileValue")
    return stored and not GENERATED.match(operation.outputs[0].name)


def _rewrite(block, kept: set[str], renamed: dict[str, str], constants: dict[bytes, str], numbers) -> None:
    """renamed: old → new name of the values in sight; constants: value → name of its constant."""
    operations = []
    for operation in block.operations:
        name = operation.outputs[0].name if operation.outputs else None
        if operation.type == "const" and name not in kept:
            value = operation.attributes["val"].SerializeToString(deterministic=True)
            if value in constants:
                renamed[name] = constants[value]
                continue
            _rename(operation, kept, renamed, numbers)
            constants[value] = renamed[name]
        else:
            _rename(operation, kept, renamed, numbers)
        for nested in operation.blocks:
            # What a nested block defines is not in sight outside it.
            _rewrite(nested, kept, dict(renamed), dict(constants), numbers)
        operations.append(MIL_pb2.Operation.FromString(operation.SerializeToString()))
    del block.operations[:]
    block.operations.extend(operations)


def _rename(operation: MIL_pb2.Operation, kept: set[str], renamed: dict[str, str], numbers) -> None:
    for name in operation.inputs:
        for binding in operation.inputs[name].arguments:
            if binding.HasField("name"):
                binding.name = renamed.get(binding.name, binding.name)
    for value in operation.outputs:
        if value.name not in kept:
            renamed[value.name] = f"v{next(numbers)}"
            value.name = renamed[value.name]
    if operation.outputs and "name" in operation.attributes:
        operation.attributes["name"].immediateValue.tensor.strings.values[:] = [operation.outputs[0].name]


ALIGNMENT = 64
# Bytes that are in memory at a time.
PIECE = 1 << 24
_FILE = struct.Struct("<II")
_RECORD = struct.Struct("<IIQQ")


class SharedWeights:
    """Writes a weight file that several functions share: every content once. Use as a context manager.

    The MIL blob storage format, version 2 (MILBlob in coremltools' sources): a 64-byte header with the
    number of records and the version; then records, each a 64-byte header (sentinel, element type, bytes,
    offset of the data) in front of its data, both at multiples of 64. All numbers are little endian.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: dict[bytes, int] = {}
        self._known: dict[tuple[Path, int], int] = {}

    def __enter__(self) -> SharedWeights:
        self._file = open(self._path, "wb")
        self._file.write(bytes(ALIGNMENT))
        return self

    def __exit__(self, *_) -> None:
        self._file.seek(0)
        self._file.write(_FILE.pack(len(self._offsets), 2))
        self._file.close()

    def add(self, source: Path, offset: int) -> int:
        """The offset here of the record that stands at `offset` of another weight file."""
        if (found := self._known.get((source, offset))) is None:
            found = self._known[source, offset] = self._copy(source, offset)
        return found

    def _copy(self, source: Path, offset: int) -> int:
        with open(source, "rb") as file:
            file.seek(offset)
            head = file.read(ALIGNMENT)
            sentinel, element, size, start = _RECORD.unpack_from(head)
            # What stands behind the offset says how many bits of the last byte are filling.
            kind = struct.pack("<IIQ", sentinel, element, size) + head[_RECORD.size :]
            digest = hashlib.sha256(kind)
            for piece in _pieces(file, start, size):
                digest.update(piece)
            key = digest.digest()
            if key not in self._offsets:
                self._offsets[key] = self._write(kind, file, start, size)
        return self._offsets[key]

    def _write(self, kind: bytes, file: BinaryIO, start: int, size: int) -> int:
        at = self._align()
        self._file.write(kind[:16] + struct.pack("<Q", at + ALIGNMENT) + kind[16:])
        for piece in _pieces(file, start, size):
            self._file.write(piece)
        return at

    def _align(self) -> int:
        self._file.write(bytes(-self._file.tell() % ALIGNMENT))
        return self._file.tell()


def _pieces(file: BinaryIO, start: int, size: int) -> Iterator[bytes]:
    file.seek(start)
    while size:
        piece = file.read(min(size, PIECE))
        if not piece:
            raise OSError(f"{file.name} ends {size} bytes too early")
        size -= len(piece)
        yield piece
