"""Commands in forked children of a process that has imported their libraries already."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.operations import Operation, operation_of, with_bytes
from tests.faults.system_calls import announce_calls, answer, receive

PATIENCE = 180.0
"""Seconds after which a child counts as hanging."""
HANGS = 124
PRELOADED = (
    "torch", "transformers", "peft", "accelerate", "datasets", "coremltools", "mlx.core", "mlx.nn",
    "tokenizers", "ss_convert.command", "ss_convert.coreml.convert", "ss_convert.coreml.package",
    "ss_convert.golden",
    "ss_device.training.command", "ss_device.training.adapt", "ss_device.training.finetune",
    "ss_device.training.pretrain", "ss_device.training.distill", "ss_device.training.bigram_bias",
    "ss_device.evaluation.replay_report", "ss_runtime.commands.generate", "ss_runtime.commands.bench",
    "ss_runtime.bench.tuner", "ss_runtime.bench.methods", "ss_runtime.backends",
    "ss_runtime.mlx.step_model", "ss_runtime.mlx.function_export", "ss_runtime.mlx.function_comparison",
    "ss_runtime.commands.cache_settings", "ss_runtime.commands.chat",
    "ss_runtime.commands.validate", "scripts.train_models",
)  # fmt: skip


def preload() -> None:
    """Import, never compute: threads of a computation would not live on in a forked child."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in PRELOADED:
        with contextlib.redirect_stderr(open(os.devnull, "w")):
            importlib.import_module(name)
    gc.freeze()


@dataclass(frozen=True)
class Finished:
    """How a child ended. status: exit code, or minus the signal's number; 124 for one that hung."""

    status: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return (self.err.strip().splitlines() or [""])[-1]


class Child:
    """`body` in a forked process in `folder`; its return value is the exit code."""

    def __init__(self, body: Callable[[], int | None], folder: Path) -> None:
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self.finished: Finished | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(body, folder)

    def _run(self, body: Callable[[], int | None], folder: Path) -> None:
        """In the child. It never returns: what the parent registered for its own end is not run here."""
        status = 1
        try:
            os.setpgid(0, 0)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(self._out.fileno(), 1)
            os.dup2(self._err.fileno(), 2)
            sys.stdin, sys.stdout, sys.stderr = (
                open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
                for number, mode in enumerate("rww")
            )
            os.chdir(folder)
            status = body() or 0
        except SystemExit as request:
            status = request.code if isinstance(request.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            gc.collect()
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def wait(self, patience: float = PATIENCE) -> Finished:
        """The end of the child; one that does not come to it is killed."""
        if not self.wait_at_most(patience):
            self.kill(HANGS)
        return self.finished

    def wait_at_most(self, seconds: float) -> bool:
        """Whether the child comes to its end within that time."""
        deadline = time.monotonic() + seconds
        while not self.ended() and time.monotonic() < deadline:
            time.sleep(0.002)
        return self.ended()

    def ended(self) -> bool:
        """Whether the child has come to its end (and takes note of how)."""
        if self.finished is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._finish(os.waitstatus_to_exitcode(status))
        return self.finished is not None

    def kill(self, status: int | None = None) -> None:
        """End the child at once. status: what counts as its exit code (default: the signal)."""
        if self.finished is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._finish(-signal.SIGKILL if status is None else status)

    def _finish(self, status: int) -> None:
        texts = []
        for file in (self._out, self._err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
            file.close()
        self.finished = Finished(status, *texts)


def run(body: Callable[[], int | None], folder: Path, patience: float = PATIENCE) -> Finished:
    """Run `body` in a child to its end."""
    return Child(body, folder).wait(patience)


def key_of(operation: Operation) -> tuple[str, tuple[Path, ...]]:
    """What makes two operations one a repetition of the other."""
    return operation.kind, operation.paths


@dataclass
class TracedChild:
    """A child that stands still before every change that it makes to files in `folder`.

    reads: also before it opens one of them to read it.
    """

    body: Callable[[], int | None]
    folder: Path
    reads: bool = False
    child: Child = field(init=False)

    def __post_init__(self) -> None:
        ours, theirs = socket.socketpair()

        def announced() -> int | None:
            ours.close()
            listener = announce_calls(self.reads)
            socket.send_fds(theirs, [b"x"], [listener])
            os.close(listener)
            theirs.close()
            return self.body()

        self.child = Child(announced, self.folder)
        theirs.close()
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        ours.close()
        if not descriptors:
            raise RuntimeError(self.child.wait().err)
        self._listener = descriptors[0]

    def operations(self, patience: float = PATIENCE) -> Iterator[Operation]:
        """The changes one by one; each happens (or is refused, see `Operation.refuse`) on the next turn."""
        waiting, before = select.poll(), None
        waiting.register(self._listener, select.POLLIN)
        try:
            while events := waiting.poll(patience * 1000):
                if events[0][1] & select.POLLHUP and not events[0][1] & select.POLLIN:
                    break
                call = receive(self._listener)
                if call is not None:
                    for operation in self._announced(call):
                        if before is not None and (before.kind, before.paths) == key_of(operation):
                            operation.repeats = before.repeats + 1
                        before = operation
                        yield operation
            else:
                self.child.kill(HANGS)
        finally:
            os.close(self._listener)
            self.child.wait(patience)

    def _announced(self, call) -> Iterator[Operation]:
        try:
            operation = operation_of(call)
            if operation.is_within(self.folder):
                with_bytes(operation, call)
                yield operation
                answer(self._listener, call, operation.refuse)
                return
        except (FileNotFoundError, ProcessLookupError):
            pass  # the caller is gone
        answer(self._listener, call)

    @property
    def finished(self) -> Finished:
        return self.child.wait()
