"""An opened Core AI asset: on Apple's local runtime from the wheel, or on the system's on a Mac.

The runtime is asynchronous. One event loop in a thread of its own serves all assets, so that callers wait
as for any function, also those that run in an event loop themselves.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ss_device.errors import UserError, library_errors

# What is preferred to compute with, on a Mac; Core AI may use others for what that has no kernel for.
COMPUTE_UNITS = {"all": None, "ane": "neural_engine", "gpu": "gpu", "cpu": "cpu"}
LOCAL = "USE_LOCAL_COREAI"
NO_FLOAT32 = (
    f"a Mac's Core AI computes as the asset says; {LOCAL}=1 takes the wheel's runtime, which has float32"
)


class OpenAsset:
    """An asset ready to run, each of its functions loaded once.

    dtype: `float16` as the asset says, `float32` for the same graph without rounding; on the local runtime
    a program is made for it (`programs.py`), but for `unchanged`; units: as in COMPUTE_UNITS.
    """

    def __init__(self, path: Path, dtype: str = "float16", units: str = "all") -> None:
        _prepare()
        self.path = path
        self._files = AsyncExitStack()
        self._functions: dict[str, Any] = {}
        with library_errors(f"{path}: Core AI cannot load it"), _quiet():
            self._model = waited_for(self._open(dtype, units))

    async def _open(self, dtype: str, units: str):
        if is_system_runtime():
            if dtype == "float32":
                raise UserError(NO_FLOAT32)
            from coreai.runtime import AIModel

            return await AIModel.load(self.path, _specialization(units))
        from coreai.authoring import AIModelAsset

        from ss_runtime.coreai.programs import in_float32, with_wide_products

        if dtype == "unchanged":
            return await self._files.enter_async_context(AIModelAsset.load(self.path).executable())
        size = asset_bytes(self.path)
        program = AIModelAsset.load(self.path).program
        program = (in_float32 if dtype == "float32" else with_wide_products)(program, size)
        with tempfile.TemporaryDirectory(prefix="ss-coreai-") as folder:
            asset = program.save_asset(Path(folder) / "local.aimodel")
            return await self._files.enter_async_context(asset.executable())

    @property
    def function_names(self) -> tuple[str, ...]:
        """Names of the asset's functions."""
        return tuple(self._model.function_names)

    def function(self, name: str) -> Any:
        """A function of the asset. UserError where it has none of that name."""
        if name not in self.function_names:
            raise UserError(f"{self.path}: has no function '{name}'")
        if name not in self._functions:
            with library_errors(f"{self.path}: Core AI cannot load '{name}'"), _quiet():
                self._functions[name] = self._model.load_function(name)
        return self._functions[name]


def asset_bytes(path: Path) -> int:
    """Size of an asset on the disk."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def is_installed() -> bool:
    """Whether `coreai-core` is there."""
    return find_spec("coreai") is not None


def is_system_runtime() -> bool:
    """Whether the system's Core AI runs assets: on macOS 27 and later, unless USE_LOCAL_COREAI is set."""
    _prepare()
    from coreai.runtime import _use_os_coreai

    return bool(_use_os_coreai)


def waited_for(coroutine: Coroutine) -> Any:
    """What a coroutine returns, run in the loop that all assets share."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="coreai", daemon=True).start()
    return loop


def _prepare() -> None:
    """Choose the runtime before the first import: off macOS there is the wheel's own alone."""
    if not is_installed():
        raise UserError("Core AI needs coreai-core: pip install 'ss-device[coreai]'")
    if sys.platform != "darwin":
        os.environ.setdefault(LOCAL, "1")


def _specialization(units: str):
    """Options for the system's runtime; None for its default."""
    if COMPUTE_UNITS[units] is None:
        return None
    from coreai.runtime import ComputeUnitKind, SpecializationOptions

    if units == "cpu":
        return SpecializationOptions.cpu_only()
    kind = getattr(ComputeUnitKind, COMPUTE_UNITS[units])()
    return SpecializationOptions.from_preferred_compute_unit_kind(kind)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the lines that the local runtime writes to the standard error's descriptor while it loads."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
