"""What an announced system call is about to do: to which file, with which bytes."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from tests.faults.system_calls import CREATES, NAMES, Notification

AT_FDCWD = 0xFFFFFF9C
# Where a call has its paths: (folder's descriptor or None, path) by argument.
PATHS = {
    "open": ((None, 0),), "creat": ((None, 0),), "openat": ((0, 1),), "openat2": ((0, 1),),
    "truncate": ((None, 0),), "rename": ((None, 0), (None, 1)), "renameat": ((0, 1), (2, 3)),
    "renameat2": ((0, 1), (2, 3)), "unlink": ((None, 0),), "unlinkat": ((0, 1),), "rmdir": ((None, 0),),
    "mkdir": ((None, 0),), "mkdirat": ((0, 1),), "link": ((None, 0), (None, 1)), "linkat": ((0, 1), (2, 3)),
    "symlink": ((None, 1),), "symlinkat": ((1, 2),), "chmod": ((None, 0),), "fchmodat": ((0, 1),),
}  # fmt: skip
DESCRIPTORS = {"mmap": 4, "splice": 2, "copy": 2}
WRITES = ("write", "writev", "pwrite", "pwritev", "pwritev2", "sendfile", "copy", "splice")
# What a full disk refuses: removing and renaming need no space.
NEED_SPACE = (*WRITES, "create", "mkdir", "mkdirat", "allocate", "link", "linkat", "symlink", "symlinkat")
# What a damaged one refuses.
TOUCH_THE_DISK = (*NEED_SPACE, "rename", "renameat", "renameat2", "fsync", "fdatasync")
NO_CHANGE = ("read", "fsync", "fdatasync", "chmod", "fchmod", "fchmodat")
FROM_FILES = ("sendfile", "copy")


@dataclass
class Operation:
    """One call. paths: absolute; data: the bytes of a write; offset: where they go (None: at the end).

    repeats: writes to the same file that came directly before; refuse: an error number to answer with; left
    at 0 the call happens.
    """

    kind: str
    paths: tuple[Path, ...]
    data: bytes = b""
    offset: int | None = None
    repeats: int = 0
    refuse: int = 0

    def label(self, folder: Path) -> str:
        """`rename .out.partial -> out`, by paths inside `folder`."""
        names = " -> ".join(os.path.relpath(p, folder) for p in self.paths)
        size = f" ({len(self.data)} bytes)" if self.kind in WRITES else ""
        return f"{self.kind} {names}{size}"

    def is_within(self, folder: Path) -> bool:
        return any(path.is_relative_to(folder) for path in self.paths)


def operation_of(call: Notification) -> Operation:
    """Read the call's arguments from the caller's memory."""
    kind, arguments = NAMES[call.number], list(call.arguments)
    if kind in PATHS:
        paths = tuple(_path(call.pid, arguments, *place) for place in PATHS[kind])
        return Operation(_open_kind(kind, arguments), paths)
    descriptor = arguments[DESCRIPTORS.get(kind, 0)] & 0xFFFFFFFF
    try:
        path = Path(os.readlink(f"/proc/{call.pid}/fd/{descriptor}"))
    except OSError:  # a descriptor that is not open: the call will fail
        path = Path("closed")
    return Operation(kind, (path,))


def with_bytes(operation: Operation, call: Notification) -> Operation:
    """The operation with what a write writes, and where."""
    if operation.kind not in WRITES or operation.kind == "splice":
        return operation
    arguments = list(call.arguments)
    descriptor = arguments[DESCRIPTORS.get(operation.kind, 0)] & 0xFFFFFFFF
    operation.data = _data(call.pid, operation.kind, arguments)
    position = _field(call.pid, descriptor, "pos")
    appends = _field(call.pid, descriptor, "flags", 8) & os.O_APPEND
    operation.offset = None if appends else position
    if operation.kind.startswith("pwrite"):
        operation.offset = arguments[3]
    return operation


def _open_kind(kind: str, arguments: list[int]) -> str:
    if kind == "creat":
        return "create"
    if kind in ("open", "openat"):
        return "create" if arguments[1 + (kind == "openat")] & CREATES else "read"
    return kind


def _path(pid: int, arguments: list[int], folder: int | None, index: int) -> Path:
    name = _text(pid, arguments[index])
    start = "cwd" if folder is None or arguments[folder] & 0xFFFFFFFF == AT_FDCWD else None
    start = start or f"fd/{arguments[folder] & 0xFFFFFFFF}"
    return Path(os.path.normpath(os.path.join(os.readlink(f"/proc/{pid}/{start}"), name)))


def _memory(pid: int, address: int, count: int) -> bytes:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(count)


def _text(pid: int, address: int) -> str:
    """A string that ends in zero. Pages are read one by one: the next may not be there."""
    found = b""
    while b"\0" not in found:
        found += _memory(pid, address + len(found), 4096 - (address + len(found)) % 4096)
    return os.fsdecode(found.split(b"\0", 1)[0])


def _data(pid: int, kind: str, arguments: list[int]) -> bytes:
    if kind in FROM_FILES:
        source = arguments[1 if kind == "sendfile" else 0] & 0xFFFFFFFF
        with open(f"/proc/{pid}/fd/{source}", "rb") as file:
            file.seek(_field(pid, source, "pos"))
            return file.read(arguments[3 if kind == "sendfile" else 4])
    if kind in ("write", "pwrite"):
        return _memory(pid, arguments[1], arguments[2])
    table = _memory(pid, arguments[1], 16 * arguments[2])
    return b"".join(_memory(pid, *struct.unpack_from("<QQ", table, 16 * i)) for i in range(arguments[2]))


def _field(pid: int, descriptor: int, name: str, base: int = 10) -> int:
    with open(f"/proc/{pid}/fdinfo/{descriptor}", encoding="ascii") as lines:
        found = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(found[name].strip(), base)
