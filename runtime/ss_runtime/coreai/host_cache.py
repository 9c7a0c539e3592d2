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
        # A part whose layers all take kept rows is given no node ids, one without such layers no rows.
        nodes = inputs["commit_nodes"] if "commit_nodes" in inputs else inputs["commit_rows"]
        kept = inputs.get("commit_rows", nodes)
        nodes = nodes[nodes >= 0]
        if not len(nodes):
            return
        slots = slice(int(inputs["commit_position"][0]), int(inputs["commit_position"][0]) + len(nodes))
        for planes, taken in ((~self._is_upper, nodes), (self._is_upper, kept[: len(nodes)])):
            state.cache[planes, :, slots] = state.rows[planes][:, :, taken]
