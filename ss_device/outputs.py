"""Outputs that appear whole or not at all, written by one process at a time."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryFile

from filelock import FileLock, Timeout

from ss_device.errors import UserError

WAIT_SECONDS = 30.0
"""How long the writer of a single file waits for another one: such a file takes no longer to write."""


def check_writable(path: Path) -> None:
    """Raise UserError unless a file of this name can be written, before the work that it is to hold."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder, expected a file")
    if not path.parent.is_dir():
        raise UserError(f"{path.parent}: no such folder")
    try:
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


def check_new_file(path: Path, force: bool) -> None:
    """As `check_writable`; UserError also for a file that is there, unless `force` says to replace it."""
    check_writable(path)
    if not force and path.is_file() and path.stat().st_size:
        raise UserError(f"{path}: exists already; --force replaces it, or choose another name")


def check_output_folder(
    output: Path, what: str, is_ours: Callable[[Path], bool], force: bool, option: str = "--output"
) -> None:
    """Raise UserError unless `output` may be written.

    Nothing is there, or an empty folder, or with `force` what the command itself wrote.
    what: the thing written, as in "an adapter"; is_ours: whether all that the folder holds is such a thing;
    option: what names the folder.
    """
    output = real_output(output)
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"{output}: is a file, expected a folder")
    if not any(output.iterdir()):
        return
    if not is_ours(output):
        raise UserError(f"{output}: exists and is not {what} of this command; choose another {option}")
    if not force:
        raise UserError(f"{output}: holds {what} already; --force replaces it, or choose another {option}")


def holds_only(folder: Path, patterns: Iterable[str]) -> bool:
    """Whether every entry of a folder has a name of one of the patterns (of `fnmatch`)."""
    names = [entry.name for entry in folder.iterdir()]
    return all(any(fnmatchcase(name, pattern) for pattern in patterns) for name in names)


@contextmanager
def folder_in_one_go(target: Path, keep_partial: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `target` that takes its place only when the block succeeds.

    An earlier `target` stays untouched until then, and one process at a time writes it (`output_lock`). A
    symbolic link stays: what it leads to is replaced. With `keep_partial` the temporary folder outlives a
    failure, so that a rerun can reuse its finished stages; it is never named like a result.
    """
    target = real_output(target)
    if target.exists() and not target.is_dir():
        raise UserError(f"{target}: is a file, expected a folder")
    with output_lock(target):
        recover_folder(target)
        temporary = _partial_folder(target, keep_partial)
        try:
            yield temporary
            _flush_tree(temporary)
        except BaseException:
            if not keep_partial:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        _replace_folder(temporary, target)


@contextmanager
def file_in_one_go(target: Path) -> Iterator[Path]:
    """Yield a temporary name with the suffix of `target`; what is written there takes its place.

    Waits for another process that writes the same file. An earlier file stays where the block fails.
    """
    suffix, target = target.suffix, real_output(target)
    if target.is_dir():
        raise UserError(f"{target}: is a folder, expected a file")
    with output_lock(target, WAIT_SECONDS):
        for left in target.parent.glob(f".{_escaped(target.name)}.partial-*"):  # of a killed process
            left.unlink(missing_ok=True)
        temporary = _partial_name(target, suffix)
        try:
            yield temporary
            _flush(temporary)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _flush(target.parent)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text in one go (`file_in_one_go`)."""
    with file_in_one_go(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def output_lock(target: Path, wait: float = 0.0) -> Iterator[None]:
    """Hold the right to write `target`; the same process may take it again inside the block.

    wait: seconds to wait for another process. UserError when that one still writes. A killed process holds
    nothing. The lock is a file `.<name>.lock` beside the target and goes with it.
    """
    target = real_output(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(target.with_name(f".{target.name}.lock"), is_singleton=True, thread_local=False)
    try:
        lock.acquire(timeout=wait)
    except Timeout as error:
        raise UserError(
            f"{target}: another process is writing it; try again when it has finished"
        ) from error
    try:
        yield
    finally:
        if lock.lock_counter == 1:  # who waits for this file sees that it is gone, and makes another one
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def recover_folder(target: Path) -> None:
    """Put the earlier folder back that a killed process had moved away from `target`.

    Only where the system cannot exchange two folders at once (`_replace_folder`).
    """
    target = real_output(target)
    previous = _previous(target)
    if not previous.exists():
        return
    with output_lock(target):
        if not target.exists():
            os.replace(previous, target)
        else:
            shutil.rmtree(previous, ignore_errors=True)


def discard_partial(target: Path) -> None:
    """Remove what an earlier process left half written, or half removed, beside a finished `target`."""
    target = real_output(target)
    with output_lock(target):
        shutil.rmtree(_kept_partial(target), ignore_errors=True)


def real_output(target: Path) -> Path:
    """The absolute path behind `target`, symbolic links followed.

    UserError for the working folder and what lies above it: such a folder cannot be replaced.
    """
    if "\0" in str(target):
        raise UserError(f"{str(target)!r}: a path cannot hold a NUL character")
    real, here = Path(os.path.realpath(target)), Path.cwd()
    if real == here or real in here.parents:
        raise UserError(f"{target}: is the working folder or one above it; choose a name inside it")
    return real


def _kept_partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def _previous(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def _partial_name(target: Path, suffix: str = "") -> Path:
    return target.with_name(f".{target.name}.partial-{os.getpid()}-{secrets.token_hex(4)}{suffix}")


def _partial_folder(target: Path, keep: bool) -> Path:
    """An empty temporary folder of a new name, or the kept one; leftovers of killed processes go."""
    for left in target.parent.glob(f".{_escaped(target.name)}.partial-*"):
        shutil.rmtree(left, ignore_errors=True)
    folder = _kept_partial(target) if keep else _partial_name(target)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _escaped(name: str) -> str:
    """A name for `glob`, in which it stands for itself."""
    return "".join(f"[{c}]" if c in "[?*" else c for c in name)


def _replace_folder(source: Path, target: Path) -> None:
    """Put `source` in the place of `target`: at once where the system can exchange two names."""
    if target.is_dir() and not _exchange(source, target):
        shutil.rmtree(_previous(target), ignore_errors=True)
        os.replace(target, _previous(target))
        os.replace(source, target)
        source = _previous(target)
    elif not os.path.lexists(target):
        os.replace(source, target)
    _flush(target.parent)
    if source.exists():  # the earlier folder now
        shutil.rmtree(source, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step (renameat2 on Linux, renamex_np on macOS); False where none is offered."""
    library = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    if sys.platform == "darwin" and hasattr(library, "renamex_np"):
        status = library.renamex_np(*names, ctypes.c_uint(2))
    elif hasattr(library, "renameat2"):
        here = ctypes.c_int(-100)  # AT_FDCWD; 2 is RENAME_EXCHANGE
        status = library.renameat2(here, names[0], here, names[1], ctypes.c_uint(2))
    else:
        return False
    if status == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _flush_tree(folder: Path) -> None:
    for place, _, files in os.walk(folder):
        for name in files:
            _flush(Path(place) / name)
        _flush(Path(place))


def _flush(path: Path) -> None:
    """Have a file's bytes, or a folder's names, reach the disk: a rename must not overtake them."""
    if path.is_symlink() or not path.exists():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError if path.is_dir() else ()):  # some file systems cannot flush a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
