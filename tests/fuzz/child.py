"""One command in a forked child of this process, which has imported everything: limits, output, ending."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import pkgutil
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.commands import Command
from tests.fuzz.sandbox import TEMPORARY, Sandbox

RAISED = 97  # exit code of a child whose command let an exception through
MOST_OUTPUT = 1 << 20
MEMORY = 3 << 30
HEAVY = (
    "torch",
    "transformers",
    "peft",
    "tokenizers",
    "mlx.core",
    "mlx_lm",
    "coremltools",
    "starlette.testclient",
)
LINUX_CAPABILITY_VERSION = 0x20080522


@dataclass(frozen=True)
class Ended:
    """How a child ended. signal: 0 where it did not end by one; seconds by the clock."""

    code: int
    signal: int
    timed_out: bool
    stdout: bytes
    stderr: bytes
    seconds: float


def import_everything() -> None:
    """Load what commands load, without a computation: threads do not survive a fork."""
    # As commands set them before they import these libraries.
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    warnings.filterwarnings("ignore")
    silent, stderr = os.open(os.devnull, os.O_WRONLY), os.dup(2)
    os.dup2(silent, 2)
    try:
        for name in HEAVY:
            importlib.import_module(name)
        for package in ("ss_device", "ss_convert", "ss_runtime"):
            folder = importlib.import_module(package).__path__
            for module in pkgutil.walk_packages(folder, package + "."):
                if not module.name.endswith("__main__"):
                    importlib.import_module(module.name)
    finally:
        os.dup2(stderr, 2)
    gc.collect()
    gc.freeze()


def run(command: Command, sandbox: Sandbox, limit: float, unprivileged: bool = False) -> Ended:
    """The command in the sandbox, killed after `limit` seconds."""
    files = {name: sandbox.root / TEMPORARY / f"fuzz.{name}" for name in ("stdin", "stdout", "stderr")}
    files["stdin"].write_text(command.stdin)
    sys.stdout.flush()
    sys.stderr.flush()
    started = time.perf_counter()
    process = os.fork()
    if process == 0:
        _child(command, sandbox, files, limit, unprivileged)
    status, timed_out = _wait(process, limit)
    seconds = time.perf_counter() - started
    output = {name: _read(files[name]) for name in ("stdout", "stderr")}
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return Ended(code, ended_by, timed_out, output["stdout"], output["stderr"], seconds)


def _wait(process: int, limit: float) -> tuple[int, bool]:
    """Status of the child, and whether it had to be killed."""
    descriptor = os.pidfd_open(process)
    try:
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        timed_out = not waiting.poll(limit * 1000)
    finally:
        os.close(descriptor)
        ended, status = os.waitpid(process, os.WNOHANG)
        if not ended:
            os.kill(process, signal.SIGKILL)
            status = os.waitpid(process, 0)[1]
    return status, timed_out


def _read(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(MOST_OUTPUT)


def _child(command: Command, sandbox: Sandbox, files: dict, limit: float, unprivileged: bool) -> None:
    """Never returns."""
    code = RAISED
    try:
        _redirect(files)
        faulthandler.enable()
        faulthandler.dump_traceback_later(max(limit - 1, limit / 2), exit=False)
        _limit(sandbox, unprivileged)
        code = command.main()(list(command.arguments))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        faulthandler.cancel_dump_traceback_later()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                code = RAISED
        os._exit(code & 255 if isinstance(code, int) else RAISED)


def _redirect(files: dict) -> None:
    os.dup2(os.open(files["stdin"], os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(files[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)


def _limit(sandbox: Sandbox, unprivileged: bool) -> None:
    """Memory, core files, working directory, environment."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
    os.chdir(sandbox.work)
    home = str(sandbox.root / TEMPORARY)
    os.environ |= {"HOME": home, "TMPDIR": home, "MPLCONFIGDIR": home, "SS_APPS": "apps"}
    import tempfile

    tempfile.tempdir = None
    if unprivileged and os.getuid() == 0:
        _drop_capabilities()


def _drop_capabilities() -> None:
    """Without them root, too, is held to a file's mode."""
    library = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION, 0)
    library.capset(header, (ctypes.c_uint32 * 6)())
