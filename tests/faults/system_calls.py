"""System calls of a child process that change files, announced before they happen (Linux, x86-64).

A seccomp filter in the child has the kernel ask the parent before every such call, whether Python, Rust
or C++ makes it: nothing has to be wrapped, and nothing can be missed. The parent lets it pass, refuses it
with an error number, or kills the child.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

# Numbers of x86-64. Those of one meaning stand together.
CALLS = {
    1: "write", 20: "writev", 18: "pwrite", 296: "pwritev", 328: "pwritev2", 40: "sendfile", 326: "copy",
    275: "splice", 76: "truncate", 77: "ftruncate", 285: "allocate", 82: "rename", 264: "renameat",
    316: "renameat2", 87: "unlink", 263: "unlinkat", 84: "rmdir", 83: "mkdir", 258: "mkdirat", 86: "link",
    265: "linkat", 88: "symlink", 266: "symlinkat", 74: "fsync", 75: "fdatasync", 90: "chmod", 91: "fchmod",
    268: "fchmodat",
}  # fmt: skip
OPEN, CREAT, OPENAT, OPENAT2, MMAP = 2, 85, 257, 437, 9
NAMES = {**CALLS, OPEN: "open", CREAT: "creat", OPENAT: "openat", OPENAT2: "openat2", MMAP: "mmap"}
CREATES = os.O_CREAT | os.O_TRUNC

SECCOMP, SET_MODE_FILTER, NEW_LISTENER, NO_NEW_PRIVILEGES = 317, 1, 8, 38
NOTIFY, ALLOW = 0x7FC00000, 0x7FFF0000
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
NUMBER_AT, ARGUMENTS_AT = 0, 16
RECEIVE, SEND = 0xC0502100, 0xC0182101
CONTINUE = 1


class FilterInstruction(ctypes.Structure):
    """struct sock_filter"""

    _fields_ = [
        ("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)
    ]  # fmt: skip


class FilterProgram(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(FilterInstruction))]


class Notification(ctypes.Structure):
    """struct seccomp_notif"""

    _fields_ = [
        ("id", ctypes.c_uint64), ("pid", ctypes.c_uint32), ("flags", ctypes.c_uint32),
        ("number", ctypes.c_int32), ("machine", ctypes.c_uint32), ("pointer", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * 6),
    ]  # fmt: skip


def why_not_here() -> str | None:
    """Why calls cannot be announced on this machine; None where they can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "system calls are announced on Linux on x86-64 only"
    try:
        with open("/proc/sys/kernel/seccomp/actions_avail", encoding="ascii") as file:
            found = "user_notif" in file.read().split()
    except OSError:
        found = False
    return None if found else "this kernel has no seccomp user notification"


def announce_calls(reads: bool = False) -> int:
    """Have this process's calls announced from here on; the descriptor that they are announced on.

    reads: opening a file to read it is announced as well.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    code = _program(reads)
    array = (FilterInstruction * len(code))(*code)
    program = FilterProgram(len(code), array)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    listener = libc.syscall(SECCOMP, SET_MODE_FILTER, NEW_LISTENER, ctypes.byref(program))
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp refuses the filter")
    return listener


def _program(reads: bool) -> list[FilterInstruction]:
    """Notify of the calls above, of opens that create or truncate, of files mapped to be written."""

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> FilterInstruction:
        return FilterInstruction(code, yes, no, value)

    def argument(index: int) -> FilterInstruction:
        return step(LOAD, ARGUMENTS_AT + 8 * index)

    blocks = [[step(EQUAL, number, 0, 1), step(RETURN, NOTIFY)] for number in (*CALLS, CREAT, OPENAT2)]
    for number, flags in ((OPEN, 1), (OPENAT, 2)):
        test = [] if reads else [argument(flags), step(ANY_BIT, CREATES, 1, 0), step(RETURN, ALLOW)]
        body = [*test, step(RETURN, NOTIFY)]
        blocks.append([step(EQUAL, number, 0, len(body)), *body])
    body = [  # PROT_WRITE, MAP_SHARED, not MAP_ANONYMOUS
        argument(2), step(ANY_BIT, 2, 1, 0), step(RETURN, ALLOW),
        argument(3), step(ANY_BIT, 1, 1, 0), step(RETURN, ALLOW),
        step(ANY_BIT, 0x20, 1, 0), step(RETURN, NOTIFY), step(RETURN, ALLOW),
    ]  # fmt: skip
    blocks.append([step(EQUAL, MMAP, 0, len(body)), *body])
    return [step(LOAD, NUMBER_AT), *(i for block in blocks for i in block), step(RETURN, ALLOW)]


def receive(listener: int) -> Notification | None:
    """The next call; None when the caller is gone."""
    notification = Notification()
    if _control(listener, RECEIVE, notification) < 0:
        return None
    return notification


def answer(listener: int, notification: Notification, error: int = 0) -> None:
    """Let a call happen, or have it fail with an error number. A caller that is gone is no error."""
    packed = struct.pack("<QqiI", notification.id, 0, -error, 0 if error else CONTINUE)
    _control(listener, SEND, ctypes.create_string_buffer(packed, len(packed)))


def _control(listener: int, request: int, argument) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.ioctl(listener, ctypes.c_ulong(request), ctypes.byref(argument))
