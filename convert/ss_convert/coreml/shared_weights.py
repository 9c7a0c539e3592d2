"""A weight file that several functions share: every content once, copied record by record.

The MIL blob storage format, version 2 (MILBlob in coremltools' sources): a 64-byte header with the number
of records and the version; then records, each a 64-byte header (sentinel, element type, bytes, offset of
the data) in front of its data, both at multiples of 64. All numbers are little endian.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

ALIGNMENT = 64
# Bytes that are in memory at a time.
PIECE = 1 << 24
_FILE = struct.Struct("<II")
_RECORD = struct.Struct("<IIQQ")


class SharedWeights:
    """Writes a weight file; what was added before is not written again. Use as a context manager."""

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
