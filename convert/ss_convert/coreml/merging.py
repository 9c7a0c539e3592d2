"""Several packages' functions in one package, at the level of the files.

coremltools' `save_multifunction` builds every function's program again with all its weights in memory.
Here functions are copied as they were written, only the offsets of their constants change: memory does
not grow with the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from coremltools.models.utils import save_spec
from coremltools.proto import MIL_pb2, Model_pb2
from google.protobuf.message import DecodeError

from ss_convert.coreml.compact import compact
from ss_convert.coreml.reproducible import write_specification
from ss_convert.coreml.shared_weights import SharedWeights
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
