"""The ids of arrays in an exported function, numbered in their order: the same file from every process.

MLX writes the addresses that a graph's arrays had in memory (mlx/export.cpp). A file is a version, the
number of functions and settings, and per function: names of its inputs, their ids and types, ids of its
outputs, and the graph's arrays in order. An array is an id and then a primitive with the ids of its
inputs, or a constant, whose data stand in the file once, or an input. What a primitive keeps beside its
inputs has a layout of its own and no ids; it ends where the types of its outputs, and an array that refers
to known ones, follow.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

# Longest that a primitive keeps beside its inputs, in bytes; most have some tens.
LONGEST_STATE = 1 << 14
MOST = 64  # dimensions of an array, inputs and outputs of a primitive
# Bytes of a number by its kind in MLX's order: bool, uint8 to uint64, int8 to int64, float16 to float64,
# bfloat16, complex64.
ITEM_SIZES = (1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 2, 8)


class UnknownLayout(Exception):
    """The file is not laid out as described above: another version of MLX wrote it."""


@dataclass(frozen=True)
class _Id:
    """An id and where it stands, in bytes."""

    value: int
    offset: int


@dataclass(frozen=True)
class _Array:
    """An array of a graph. outputs: it and its siblings, where a primitive has several."""

    id: _Id
    inputs: tuple[_Id, ...] = ()
    outputs: tuple[_Id, ...] = ()
    is_constant: bool = False


@dataclass(frozen=True)
class _Function:
    inputs: tuple[_Id, ...]
    outputs: tuple[_Id, ...]
    arrays: tuple[_Array, ...]


def number_ids(path: Path) -> bool:
    """Replace the ids in a `.mlxfn` file by numbers from 1. False, and no change, for an unknown layout."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        try:
            functions = _Reader(content).functions()
            numbers = _numbered(functions)
        except (UnknownLayout, struct.error, KeyError):
            return False
        for offset, number in numbers:
            struct.pack_into("<Q", content, offset, number)
        content.flush()
    return True


def _numbered(functions: list[_Function]) -> list[tuple[int, int]]:
    """(offset, number) of every id. Constants are known to all functions, other arrays to their own.

    KeyError for an id that nothing defines.
    """
    constants: dict[int, int] = {}
    found: list[tuple[int, int]] = []
    last = 0
    for function in functions:
        own: dict[int, int] = {}
        for name in function.inputs:
            own[name.value] = last = last + 1
        for array in function.arrays:
            found += [(name.offset, own[name.value]) for name in array.inputs]
            for name in (array.id, *array.outputs):
                known = constants if array.is_constant else own
                if name.value not in known:
                    known[name.value] = last = last + 1
                own[name.value] = known[name.value]
                found.append((name.offset, own[name.value]))
        found += [(name.offset, own[name.value]) for name in (*function.inputs, *function.outputs)]
    return found


class _Reader:
    """Reads a file from the front; UnknownLayout or struct.error where it is not as expected."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._at = content, 0
        self._constants: set[int] = set()

    def functions(self) -> list[_Function]:
        self._text()  # MLX's version
        count, *_ = self._take("<iBQ")
        found = [self._function() for _ in range(count)]
        if self._at != len(self._content):
            raise UnknownLayout
        return found

    def _function(self) -> _Function:
        self._signature()
        inputs = self._ids()
        for _ in range(self._count()):
            self._type()
        outputs, known, arrays = self._ids(), {name.value for name in inputs}, []
        (count,) = self._take("<Q")
        for _ in range(count):
            array = self._array(known, last=len(arrays) == count - 1)
            known.update(name.value for name in (array.id, *array.outputs))
            arrays.append(array)
        return _Function(inputs, outputs, tuple(arrays))

    def _signature(self) -> None:
        for _ in range(self._count()):
            self._text()

    def _array(self, known: set[int], last: bool) -> _Array:
        name = self._id()
        if self._flag():
            inputs = self._ids()
            self._take("<iii")  # the stream
            self._text()  # the primitive
            known.add(name.value)
            return _Array(name, inputs, self._outputs(known, last))
        if not self._flag():
            return _Array(name)
        if name.value not in self._constants:
            self._constants.add(name.value)
            size = self._type()
            self._at += size
        return _Array(name, is_constant=True)

    def _outputs(self, known: set[int], last: bool) -> tuple[_Id, ...]:
        """Go past what a primitive keeps and the types of its outputs. → ids, where they are several."""
        for start in range(self._at, self._at + LONGEST_STATE):
            self._at = start
            try:
                outputs = self._types()
                end = self._at
                self._check_next(known, {name.value for name in outputs}, last)
            except UnknownLayout:
                continue
            self._at = end
            return outputs
        raise UnknownLayout

    def _types(self) -> tuple[_Id, ...]:
        if not (siblings := self._count()):
            self._type()
            return ()
        names = self._ids()
        shapes = [self._shape() for _ in range(self._count())]
        kinds = [self._kind() for _ in range(self._count())]
        if not siblings + 1 == len(names) == len(shapes) == len(kinds):
            raise UnknownLayout
        return names

    def _check_next(self, known: set[int], siblings: set[int], last: bool) -> None:
        """Raise UnknownLayout unless the graph's next array, a function or the end stands here."""
        if last:
            if self._at != len(self._content):
                self._signature()
                self._ids()
            return
        name = self._id()
        if self._flag():
            if any(n.value not in known and n.value not in siblings for n in self._ids()):
                raise UnknownLayout
        elif self._flag():
            if name.value not in self._constants:
                self._type()
        elif name.value not in known:
            raise UnknownLayout

    def _take(self, layout: str) -> tuple:
        try:
            values = struct.unpack_from(layout, self._content, self._at)
        except struct.error as error:
            raise UnknownLayout from error
        self._at += struct.calcsize(layout)
        return values

    def _count(self) -> int:
        (count,) = self._take("<Q")
        if count > MOST:
            raise UnknownLayout
        return count

    def _flag(self) -> bool:
        (flag,) = self._take("<B")
        if flag > 1:
            raise UnknownLayout
        return flag == 1

    def _text(self) -> None:
        length = self._count()
        if not self._content[self._at : self._at + length].isascii():
            raise UnknownLayout
        self._at += length

    def _id(self) -> _Id:
        offset = self._at
        return _Id(*self._take("<Q"), offset)

    def _ids(self) -> tuple[_Id, ...]:
        return tuple(self._id() for _ in range(self._count()))

    def _shape(self) -> tuple[int, ...]:
        shape = self._take(f"<{self._count()}i")
        if any(extent < 0 for extent in shape):
            raise UnknownLayout
        return shape

    def _kind(self) -> int:
        """Bytes of a number of the kind that stands here."""
        kind, size = self._take("<iB")
        if not 0 <= kind < len(ITEM_SIZES) or ITEM_SIZES[kind] != size:
            raise UnknownLayout
        return size

    def _type(self) -> int:
        """Shape and kind of an array. → its bytes."""
        return prod(self._shape()) * self._kind()
