"""Functions of a Core AI asset on Apple's runtime: the wheel's own on Linux, the system's on a Mac.

The runtime is asynchronous; calls of one model follow each other, so every call is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ss_device.errors import UserError, one_line

STATE = "kv_cache"


class Asset:
    """An opened asset. Its functions share it; it is closed with the last of them."""

    def __init__(self, path: Path) -> None:
        runtime = _runtime()
        self.path = path
        self._loop = asyncio.new_event_loop()
        from coreai.authoring import AIModelAsset
        self._stack = contextlib.AsyncExitStack()
        self._runtime = runtime
        self.model = self.wait(self._stack.enter_async_context(AIModelAsset.load(path).executable()))

    def wait(self, awaitable):
        return self._loop.run_until_complete(awaitable)


def _runtime():
    if sys.platform == "linux":
        os.environ.setdefault("USE_LOCAL_COREAI", "1")
    import coreai.runtime

    return coreai.runtime


class AssetFunction:
    """A function of an asset, as an `Engine` of the step model."""

    def __init__(self, asset: Asset, name: str) -> None:
        self._asset, self._function = asset, asset.model.load_function(name)
        self._desc = self._function.desc
        self.NDArray = asset._runtime.NDArray

    def make_state(self):
        d = self._desc.state_descriptor(STATE)
        return {STATE: self.NDArray(np.zeros(tuple(d.shape), str(d.dtype)))}

    def predict(self, inputs: Mapping[str, np.ndarray], state):
        given = {}
        for name, array in inputs.items():
            given[name] = self.NDArray(np.ascontiguousarray(array, str(self._desc.input_descriptor(name).dtype)))
        out = self._asset.wait(self._function(given, state))
        return {name: value.numpy() for name, value in out.items()}
