"""The Core ML step model: drives a package's prefill and step functions through an injected engine.

The functions' inputs, outputs and state are described in `ss_convert/coreml/interface.py`. Engines are
Core ML itself on a Mac and the reference executor everywhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from ss_device.architecture import Architecture
from ss_device.bundle import Bundle, BundledAdapter, CoreMLFunctions
from ss_device.config import SpeculativeConfig
from ss_device.decoding import Proposal, StepLimits, Verified
from ss_device.errors import UserError, one_line
from ss_device.tree import DraftTree, root_only

MASKED = np.float16(-1e4)
NOTHING = np.zeros(0, np.int32)


class Engine(Protocol):
    """One function, ready to run. A state made by one engine of a package fits the others."""

    def make_state(self):
        """A fresh state."""

    def predict(self, inputs: Mapping[str, np.ndarray], state) -> Mapping[str, np.ndarray]:
        """Run the function once; changes `state`."""


class CoreMLStepModel:
    """StepModel over a package's two functions (ARCHITECTURE.md: Step model). One sequence.

    A commit is lazy: it is remembered here and carried out at the start of the next step call.
    """

    def __init__(
        self,
        prefill_engine: Engine,
        step_engine: Engine,
        functions: CoreMLFunctions,
        config: SpeculativeConfig,
        architecture: Architecture,
    ) -> None:
        self.functions = functions
        self.architecture = architecture
        self.limits = StepLimits(
            num_nodes=functions.num_nodes,
            num_kept=functions.num_kept,
            num_streams=config.num_streams,
            context=functions.context,
        )
        self._prefill_engine, self._step_engine = prefill_engine, step_engine
        self._gated = config.main_attends_streams
        self._state = step_engine.make_state()
        self._length = 0
        self._last: Verified | None = None
        self._accepted = (0, NOTHING, NOTHING)  # first slot, node ids, rows among the kept

    @property
    def length(self) -> int:
        """Committed positions."""
        return self._length

    @property
    def state(self):
        """The engine's state; what a pending commit keeps is still in its scratch slots."""
        return self._state

    def prefill(self, tokens: Sequence[int]) -> Proposal:
        """All but the last prompt token in chunks; the last one as a one-node tree with streams.

        The state is reused: masks hide what an earlier text left in it. Raises UserError for an empty
        prompt or one longer than the context.
        """
        if not 1 <= len(tokens) <= self.limits.context:
            raise UserError(
                f"the prompt has {len(tokens)} tokens, this model takes 1 to {self.limits.context}"
            )
        self._length, self._last = 0, None
        for start in range(0, len(tokens) - 1, self.functions.chunk):
            self._prefill_chunk(tokens[start : min(start + self.functions.chunk, len(tokens) - 1)])
        self._accepted = (self._length, NOTHING, NOTHING)
        verified = self.step(root_only(int(tokens[-1])))
        self.commit([0])
        return Proposal(int(verified.chosen[0]), verified.stream_logits)

    def step(self, tree: DraftTree) -> Verified:
        """Verify a tree of at most N nodes (METHOD: One decoding step). Raises UserError if larger."""
        if tree.num_nodes > self.limits.num_nodes:
            raise UserError(f"{tree.num_nodes} nodes, this model takes at most {self.limits.num_nodes}")
        outputs = self._step_engine.predict(self.step_inputs(tree), self._state)
        kept = np.asarray(outputs["kept"], np.int32)
        real = kept < tree.num_nodes
        self._last = Verified(
            kept=kept[real],
            chosen=np.asarray(outputs["chosen"], np.int32)[real],
            accepted=int(np.asarray(outputs["accepted"]).reshape(())),
            stream_logits=np.asarray(outputs["stream_logits"], np.float32),
        )
        # The call consumed the scratch rows of the step before.
        self._accepted = (self._length, NOTHING, NOTHING)
        return self._last

    def commit(self, path: Sequence[int]) -> None:
        """Keep these nodes (root first) of the last tree. Raises UserError when the context is full."""
        if self._last is None:
            raise ValueError("commit needs a step before it")
        if self._length + len(path) > self.limits.context:
            raise UserError(f"the context of {self.limits.context} tokens is full")
        nodes = np.asarray(path, np.int32)
        rows = np.searchsorted(self._last.kept, nodes).astype(np.int32)
        if not np.array_equal(self._last.kept[np.minimum(rows, len(self._last.kept) - 1)], nodes):
            raise ValueError(f"path {list(path)} holds nodes that were not kept")
        self._accepted = (self._length, nodes, rows)
        self._length += len(path)
        self._last = None

    def step_inputs(self, tree: DraftTree) -> dict[str, np.ndarray]:
        """The step function's inputs for `tree`, the pending commit included."""
        size, context, count = self.limits.num_nodes, self.limits.context, tree.num_nodes
        slot, nodes, rows = self._accepted
        mask = np.full((size, context + size), MASKED, np.float16)
        mask[:count, : self._length] = 0
        mask[:, context:][tree.ancestor_mask(size)] = 0
        inputs = {
            # Padding repeats the root: any other id might have an all-zero embedding, a 0/0 in a norm.
            "tokens": _padded(tree.tokens, size, tree.tokens[0])[None],
            "positions": _padded(self._length + tree.depths, size, self._length),
            "parents": _padded(tree.parents, size, -1),
            "mask": mask,
            "commit_position": np.array([slot], np.int32),
            "commit_nodes": _padded(nodes, size, -1),
        }
        if self.limits.num_kept < size:
            inputs["commit_rows"] = _padded(rows, size, -1)
        if self._gated:
            inputs["stream_gate"] = np.zeros(1, np.float16)
        return inputs

    def _prefill_chunk(self, tokens: Sequence[int]) -> None:
        size, context = self.functions.chunk, self.limits.context
        mask = np.full((size, context + size), MASKED, np.float16)
        mask[:, : self._length] = 0
        mask[:, context:][np.tri(size, dtype=bool)] = 0
        inputs = {
            "tokens": _padded(np.asarray(tokens, np.int32), size, tokens[-1])[None],
            "position": np.array([self._length], np.int32),
            "mask": mask,
        }
        self._prefill_engine.predict(inputs, self._state)
        self._length += len(tokens)


def open_executor_model(
    bundle: Bundle, adapter: BundledAdapter, arithmetic: str = "float16"
) -> CoreMLStepModel:
    """The adapter's package on the reference executor (any system, slow).

    arithmetic: `float16` rounds as the package stores, `float32` shows the graph without rounding.
    """
    from ss_convert.coreml.executor import load_package

    functions = _functions(bundle, adapter)
    package = load_package(bundle.path / functions.package)
    engines = [package.program(name, arithmetic) for name in (functions.prefill, functions.step)]
    return CoreMLStepModel(*engines, functions, adapter.config, bundle.manifest.architecture)


def open_coreml_model(bundle: Bundle, adapter: BundledAdapter) -> CoreMLStepModel:
    """The adapter's package on Core ML. Raises UserError off macOS or when Core ML refuses it."""
    functions = _functions(bundle, adapter)
    if sys.platform != "darwin":
        raise UserError(
            f"Core ML needs macOS 15 or later, this is {sys.platform}; the reference executor runs "
            f"the same package here"
        )
    path = bundle.path / functions.package
    engines = [_CoreMLEngine(path, name) for name in (functions.prefill, functions.step)]
    return CoreMLStepModel(*engines, functions, adapter.config, bundle.manifest.architecture)


class _CoreMLEngine:
    """A function of a package on Core ML, through coremltools."""

    def __init__(self, path, function: str) -> None:
        try:
            from coremltools.models import MLModel
        except ImportError as error:
            raise UserError("Core ML needs coremltools: pip install coremltools") from error
        try:
            self._model = MLModel(str(path), function_name=function)
        except Exception as error:  # coremltools raises bare exceptions with Core ML's message
            raise UserError(f"{path}: Core ML cannot load '{function}': {one_line(error)}") from error

    def make_state(self):
        return self._model.make_state()

    def predict(self, inputs, state):
        return self._model.predict(dict(inputs), state=state)


def _functions(bundle: Bundle, adapter: BundledAdapter) -> CoreMLFunctions:
    if adapter.coreml is None:
        raise UserError(f"{bundle.path}: adapter '{adapter.app}' has no Core ML package in this bundle")
    return adapter.coreml


def _padded(values: np.ndarray, size: int, filler: int) -> np.ndarray:
    """int32 [size]: `values`, then `filler`."""
    out = np.full(size, filler, np.int32)
    out[: len(values)] = values
    return out
