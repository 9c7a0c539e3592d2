"""A saved `.mlpackage`: its functions, metadata, weights, and programs prepared from it."""

import json
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np

from .errors import ExecutorError, PackageError
from .graph import Block, Feature, Function, TensorType
from .program import Program
from .protobuf import model_messages
from .spec import read_program

DTYPES = ("float16", "float32")


@dataclass
class Package:
    """A loaded package. Decoded weights are kept here and shared by all programs."""

    path: Path
    functions: dict[str, Function]
    metadata: dict[str, str]
    specification_version: int
    weight_bytes: int
    _weights: dict[tuple, np.ndarray] = field(default_factory=dict, repr=False)

    def program(self, function: str, dtype: str = "float16", keep_weights: bool = True) -> Program:
        """Prepare a function for running.

        dtype "float16": every fp16 tensor is rounded to fp16 after every operation, inside
        an operation numbers are float32. "float32": fp16 tensors are never rounded.
        keep_weights: decoded weights stay in memory for the next call; otherwise each is decoded
        when an operation needs it and dropped behind it, which takes little memory and more time.
        Raises UnknownOpError for an operation that is not implemented, ExecutorError otherwise.
        """
        if function not in self.functions:
            known = ", ".join(sorted(self.functions))
            raise ExecutorError(f"{self.path}: no function '{function}' (it has: {known})")
        if dtype not in DTYPES:
            raise ExecutorError(f"dtype must be float16 or float32, not '{dtype}'")
        return Program(self.functions[function], dtype, self._weights if keep_weights else None)


def load_package(path: str | Path) -> Package:
    """Read a package and check that every constant it refers to is there; PackageError if not."""
    path = Path(path)
    model_path = _model_path(path)
    spec = _parse(model_path, path)
    program = read_program(spec.mlProgram, model_path.parent, path)
    functions = {name: _function(name, *parts) for name, parts in program.functions.items()}
    described = spec.description.metadata
    metadata = dict(described.userDefined)
    for key in ("shortDescription", "author", "license", "versionString"):
        if value := getattr(described, key):
            metadata.setdefault(key, value)
    weight_bytes = sum(blob.size for blob in program.blobs.values())
    return Package(path, functions, metadata, spec.specificationVersion, weight_bytes)


def _model_path(path: Path) -> Path:
    """The model file that the manifest of the package names as its root."""
    if not path.exists():
        raise PackageError(f"{path}: no such package (expected a .mlpackage folder)")
    manifest = path / "Manifest.json"
    if not manifest.is_file():
        raise PackageError(f"{path}: not a .mlpackage (expected a folder with Manifest.json)")
    try:
        data = json.loads(manifest.read_text())
        root = PurePosixPath(data["itemInfoEntries"][data["rootModelIdentifier"]]["path"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise PackageError(f"{manifest}: damaged (expected JSON that names a root model)") from None
    if root.is_absolute() or ".." in root.parts or "\0" in str(root):
        raise PackageError(f"{manifest}: damaged (its root model lies outside the package)")
    model_path = path / "Data" / root
    if not model_path.is_file():
        raise PackageError(f"{path}: the model file 'Data/{root}' named by the manifest is missing")
    return model_path


def _parse(model_path: Path, path: Path):
    """Protobuf message of the model file."""
    spec = model_messages().Model()
    try:
        spec.ParseFromString(model_path.read_bytes())
    except Exception as error:  # the exception class depends on the protobuf implementation
        if type(error).__name__ != "DecodeError":
            raise
        raise PackageError(f"{model_path}: damaged (expected a Core ML model file)") from None
    kind = spec.WhichOneof("Type")
    if kind != "mlProgram":
        raise PackageError(f"{path}: holds {kind or 'no model'} (expected an ML program)")
    return spec


def _function(name: str, inputs: list[tuple[str, TensorType]], opset: int, block: Block):
    """Public description of a function from its parts."""
    types = dict(inputs)
    for operation in block.operations:
        types.update(operation.outputs)
    features = {key: Feature(key, type_.shape, type_.dtype) for key, type_ in types.items()}
    missing = [key for key in block.outputs if key not in features]
    if missing:
        raise PackageError(f"function '{name}': output '{missing[0]}' is computed nowhere")
    return Function(
        name=name,
        inputs={key: features[key] for key, type_ in inputs if not type_.state},
        outputs={key: features[key] for key in block.outputs},
        states={key: features[key] for key, type_ in inputs if type_.state},
        opset=opset,
        block=block,
    )
