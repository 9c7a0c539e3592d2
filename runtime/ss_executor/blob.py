"""Reader of the weight file of a package (the MIL blob storage format, version 2).

The file starts with a 64-byte header (record count, version). A record is a 64-byte header
(sentinel, element type, byte count, data offset) that points at the data; a program refers to a
record by the offset of that header. All numbers are little endian.
"""

import os
import struct
from pathlib import Path

import numpy as np

from .dtypes import BY_NAME, unpack_bits
from .errors import PackageError
from .graph import TensorType

_SENTINEL = 0xDEADBEEF
_RECORD = struct.Struct("<IIQQ")
_HEADER = struct.Struct("<II")
_TYPE_NAMES = {
    1: "float16", 2: "float32", 3: "uint8", 4: "int8", 6: "int16", 7: "uint16", 8: "int4",
    9: "uint1", 10: "uint2", 11: "uint4", 12: "uint3", 13: "uint6", 14: "int32", 15: "uint32",
}  # fmt: skip
_STORED_AS = {"bool": "uint8"}


class BlobFile:
    """One weight file. Records are checked when the package is loaded and read when needed."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with open(path, "rb") as file:
                head = file.read(_HEADER.size)
                self.size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise PackageError(f"{path}: weight file cannot be read ({error.strerror})") from None
        if len(head) < _HEADER.size or _HEADER.unpack(head)[1] != 2:
            raise PackageError(f"{path}: not a weight file of blob storage version 2")

    def check(self, offset: int, type_: TensorType) -> tuple[int, int]:
        """Find the record at `offset` and compare it with `type_` -> (data offset, byte count)."""
        with open(self.path, "rb") as file:
            file.seek(offset)
            head = file.read(_RECORD.size)
        if len(head) < _RECORD.size:
            raise PackageError(
                f"{self.path}: {self.size} bytes long, but a constant is expected at {offset}"
            )
        sentinel, number, byte_count, start = _RECORD.unpack(head)
        if sentinel != _SENTINEL:
            raise PackageError(f"{self.path}: no constant at offset {offset} (damaged file)")
        wanted = _STORED_AS.get(type_.dtype, type_.dtype)
        if _TYPE_NAMES.get(number) != wanted:
            raise PackageError(
                f"{self.path}: constant at {offset} is {_TYPE_NAMES.get(number, number)}, "
                f"the program expects {wanted}"
            )
        expected = -(-int(np.prod(type_.shape, dtype=np.int64)) * BY_NAME[wanted].bits // 8)
        if byte_count != expected:
            raise PackageError(
                f"{self.path}: constant at {offset} has {byte_count} bytes, the program expects {expected}"
            )
        if start + byte_count > self.size:
            raise PackageError(
                f"{self.path}: {self.size} bytes long, but a constant ends at {start + byte_count}"
            )
        return start, byte_count

    def read(self, offset: int, type_: TensorType) -> np.ndarray:
        """Values of the record at `offset`, in the type of the file; sub-byte types unpacked."""
        start, byte_count = self.check(offset, type_)
        raw = np.fromfile(self.path, np.uint8, count=byte_count, offset=start)
        return decode(raw, type_)


def decode(raw: np.ndarray, type_: TensorType) -> np.ndarray:
    """Bytes of a constant (uint8, packed) -> array of the file's type and of `type_.shape`."""
    element = BY_NAME[type_.dtype]
    if element.bits < 8:
        count = int(np.prod(type_.shape, dtype=np.int64))
        signed = not element.name.startswith("u")
        return unpack_bits(raw, element.bits, count, signed).reshape(type_.shape)
    return raw.view(element.file_dtype).reshape(type_.shape)
