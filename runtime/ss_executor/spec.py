"""Protobuf messages of an ML program -> plain data of `graph`."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .blob import BlobFile, decode
from .dtypes import BY_NAME, BY_NUMBER
from .errors import PackageError
from .graph import Argument, Block, Constant, Operation, TensorType

_MODEL_FOLDER = "@model_path/"
_STRING = 2


@dataclass
class ParsedProgram:
    """functions: name -> (inputs, opset number, block); blobs: weight files by name."""

    functions: dict[str, tuple[list[tuple[str, TensorType]], int, Block]]
    blobs: dict[str, BlobFile]


class _Reader:
    """Reads one program; keeps the weight files it meets."""

    def __init__(self, folder: Path, package: Path):
        self.folder, self.package = folder, package
        self.blobs: dict[str, BlobFile] = {}
        self.checked: set[tuple] = set()

    def tensor_type(self, value_type) -> TensorType:
        """ValueType message -> TensorType; lists, tuples and dictionaries get that name."""
        kind = value_type.WhichOneof("type")
        if kind == "stateType":
            inner = self.tensor_type(value_type.stateType.wrappedType)
            return TensorType(inner.dtype, inner.shape, state=True)
        if kind != "tensorType":
            return TensorType(kind or "none")
        number = value_type.tensorType.dataType
        element = BY_NUMBER.get(number)
        name = element.name if element else "string" if number == _STRING else f"type{number}"
        sizes = (
            dimension.constant.size if dimension.WhichOneof("dimension") == "constant" else None
            for dimension in value_type.tensorType.dimensions
        )
        return TensorType(name, tuple(sizes))

    def constant(self, value) -> Constant:
        """Value message -> Constant; blob records are checked now and read later."""
        type_ = self.tensor_type(value.type)
        if type_.dtype != "string" and type_.dtype not in BY_NAME:
            raise PackageError(f"{self.package}: constants of {type_.dtype} are not supported")
        if value.WhichOneof("value") == "blobFileValue":
            return self._blob_constant(value.blobFileValue, type_)
        data = self._immediate(value.immediateValue.tensor, type_)
        if isinstance(data, str):
            return Constant(("string", data), type_, lambda: data)
        digest = hashlib.sha256(data.tobytes()).digest() if data.nbytes > 64 else data.tobytes()
        return Constant(("value", type_, digest), type_, lambda: data)

    def _blob_constant(self, reference, type_: TensorType) -> Constant:
        name = reference.fileName.removeprefix(_MODEL_FOLDER)
        if name not in self.blobs:
            if not (self.folder / name).is_file():
                raise PackageError(f"{self.package}: weight file '{name}' is missing")
            self.blobs[name] = BlobFile(self.folder / name)
        blob, offset = self.blobs[name], reference.offset
        key = ("blob", name, offset, type_)
        if key not in self.checked:
            blob.check(offset, type_)
            self.checked.add(key)
        return Constant(key, type_, lambda: blob.read(offset, type_))

    def _immediate(self, tensor, type_: TensorType) -> "np.ndarray | str":
        kind = tensor.WhichOneof("value")
        if type_.dtype == "string":
            return tensor.strings.values[0] if tensor.strings.values else ""
        try:
            if kind == "bytes":
                return decode(np.frombuffer(tensor.bytes.values, np.uint8), type_)
            values = getattr(tensor, kind).values if kind else []
            return np.array(values, BY_NAME[type_.dtype].file_dtype).reshape(type_.shape)
        except (ValueError, OverflowError) as error:
            raise PackageError(f"{self.package}: damaged constant ({error})") from None

    def _argument(self, binding) -> Argument:
        is_name = binding.WhichOneof("binding") == "name"
        return binding.name if is_name else self.constant(binding.value)

    def operation(self, message) -> Operation:
        """Operation message -> Operation. Attributes other than the name become parameters."""
        inputs = {
            key: [self._argument(binding) for binding in argument.arguments]
            for key, argument in message.inputs.items()
        }
        name = ""
        for key, value in message.attributes.items():
            if key == "name":
                name = "".join(value.immediateValue.tensor.strings.values)
            elif value.type.WhichOneof("type") == "tensorType":
                inputs.setdefault(key, [self.constant(value)])
        outputs = [(output.name, self.tensor_type(output.type)) for output in message.outputs]
        blocks = [self.block(block) for block in message.blocks]
        return Operation(message.type, name, inputs, outputs, blocks)

    def block(self, message) -> Block:
        """Block message -> Block."""
        inputs = [(item.name, self.tensor_type(item.type)) for item in message.inputs]
        operations = [self.operation(item) for item in message.operations]
        return Block(inputs, operations, list(message.outputs))


def read_program(message, folder: Path, package: Path) -> ParsedProgram:
    """Program message -> ParsedProgram; `folder` holds the model file. PackageError if damaged."""
    reader = _Reader(folder, package)
    functions = {}
    for name, function in sorted(message.functions.items()):
        block = function.block_specializations.get(function.opset)
        if block is None:
            raise PackageError(f"{package}: function '{name}' has no block '{function.opset}'")
        inputs = [(item.name, reader.tensor_type(item.type)) for item in function.inputs]
        number = re.search(r"\d+$", function.opset)
        functions[name] = (inputs, int(number.group()) if number else 0, reader.block(block))
    if not functions:
        raise PackageError(f"{package}: the ML program has no function")
    return ParsedProgram(functions, reader.blobs)
