"""Keys and values that the host keeps, for functions whose cache is an input (`graph/interface.py`).

Such a function gives new rows instead of changing a state. Here they are what the scratch slots of a state
are elsewhere: a step's rows wait until the next call says which of them were accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

STATE = "kv_cache"


class GivenCacheFunction(Protocol):
    """A function with `kv_cache` among its inputs and `rows` among its outputs.

    shapes, dtypes: of its inputs.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]

    def predict(self, inputs: Mapping[str, np.ndarray], state: dict) -> dict[str, np.ndarray]: ...


@dataclass
class Kept:
    """cache [2·L, n_kv, C, head_dim]; rows: those of the last step, of as many planes and heads."""

    cache: np.ndarray
    rows: np.ndarray | None = None


class HostCache:
    """An engine with a state around a function without one.

    layers: those of the part; first_msa_layer: from it on rows are those of the kept nodes.
    """

    def __init__(self, function: GivenCacheFunction, layers: range, first_msa_layer: int) -> None:
        self._function = function
        self._is_upper = np.tile(np.array([layer >= first_msa_layer for layer in layers]), 2)

    def make_state(self) -> Kept:
        return Kept(np.zeros(self._function.shapes[STATE], self._function.dtypes[STATE]))

    def predict(self, inputs: Mapping[str, np.ndarray], state: Kept) -> dict[str, np.ndarray]:
        """Run the function once; what it is told to commit is written first."""
        if "commit_position" in inputs:
            self._commit(inputs, state)
        outputs = self._function.predict({**inputs, STATE: state.cache}, {})
        rows = outputs.pop("rows")
        if "position" in inputs:  # a chunk of the prompt lies behind one another
            start = int(inputs["position"][0])
            count = min(rows.shape[2], state.cache.shape[2] - start)
            state.cache[:, :, start : start + count] = rows[:, :, :count]
        else:
            state.rows = rows
        return outputs

    def _commit(self, inputs: Mapping[str, np.ndarray], state: Kept) -> None:
        """Move the accepted rows of the last step to their slots."""
        nodes, kept = (inputs.get(name) for name in ("commit_nodes", "commit_rows"))
        if nodes is None or kept is None:  # one order for all layers of the part
            nodes = kept = kept if nodes is None else nodes
        count, start = int((nodes >= 0).sum()), int(inputs["commit_position"][0])
        if not count:
            return
        for planes, taken in ((~self._is_upper, nodes), (self._is_upper, kept)):
            state.cache[planes, :, start : start + count] = state.rows[planes][:, :, taken[:count]]
