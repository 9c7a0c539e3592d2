"""The step model over a package's or an asset's two functions, through injected engines.

The functions' inputs, outputs and state are described in `ss_convert/graph/interface.py`. Engines are the
reference executor, Core ML and Core AI.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ss_device.acceptance import walk
from ss_device.adapter_inputs import for_prefill, input_values
from ss_device.architecture import Architecture
from ss_device.bundle import Bundle, BundledAdapter, StepFunctions
from ss_device.config import SpeculativeConfig
from ss_device.errors import UserError
from ss_device.files import read_tensors
from ss_device.step_checks import check_prompt, check_tree, kept_rows
from ss_device.step_model import Choose, Proposal, StepLimits, Verified
from ss_device.tree import DraftTree, root_only

MASKED = np.float16(-1e4)
NOTHING = np.zeros(0, np.int32)


class Engine(Protocol):
    """One function, ready to run. A state made by one engine of a package fits the others."""

    def make_state(self):
        """A fresh state."""

    def predict(self, inputs: Mapping[str, np.ndarray], state) -> Mapping[str, np.ndarray]:
        """Run the function once; changes `state`."""


class ChainedEngine:
    """The same function of all parts of a divided model, as one engine; its state is a list of theirs.

    feeds: per part input → source, an input of the whole function or an output of the part before.
    """

    def __init__(self, engines: Sequence[Engine], feeds: Sequence[Mapping[str, str]]) -> None:
        self._parts = tuple(zip(engines, feeds, strict=True))

    def make_state(self) -> list:
        return [engine.make_state() for engine, _ in self._parts]

    def predict(self, inputs: Mapping[str, np.ndarray], state: list) -> Mapping[str, np.ndarray]:
        """Run the parts one after another → the last one's outputs; changes `state`."""
        passed: Mapping[str, np.ndarray] = {}
        for (engine, feeds), own in zip(self._parts, state, strict=True):
            values = {**inputs, **passed}
            passed = engine.predict({name: values[source] for name, source in feeds.items()}, own)
        return passed


@dataclass
class StateCache:
    """Keys and values of one text in an engine's state.

    length: committed positions; available: the first of them that lie in their slots. The last commit's
    rows do not yet, and while a call runs nobody knows.
    """

    state: Any
    length: int = 0
    available: int = 0
    num_bytes = None  # engines do not tell


class FunctionStepModel:
    """StepModel over a package's two functions, or those of a chain (ARCHITECTURE.md). One sequence.

    A commit is lazy: it is remembered here and carried out at the start of the next step call. `choose`
    needs a package made with `--sampling`: only its limits are not `greedy_only`. adapter_inputs: the
    adapter's tensors for functions that take them (`ss_device/adapter_inputs.py`). cache: may be exchanged
    between two generations (`reused_text.py`).
    """

    def __init__(
        self,
        prefill_engine: Engine,
        step_engine: Engine,
        functions: StepFunctions,
        config: SpeculativeConfig,
        architecture: Architecture,
        adapter_inputs: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self._adapter = dict(adapter_inputs or {})
        self.functions, self.config = functions, config
        self.architecture = architecture
        self.limits = StepLimits(
            num_nodes=functions.num_nodes,
            num_kept=functions.num_kept,
            num_streams=config.num_streams,
            context=functions.context,
            greedy_only=not functions.sampling,
            vocab_size=architecture.vocab_size,
        )
        self._prefill_engine, self._step_engine = prefill_engine, step_engine
        self.cache = StateCache(step_engine.make_state())
        self._last: Verified | None = None
        self._accepted = (0, NOTHING, NOTHING)  # first slot, node ids, rows among the kept

    @property
    def length(self) -> int:
        """Committed positions."""
        return self.cache.length

    @property
    def input_bytes(self) -> int:
        """Bytes of the adapter's tensors that every call is given."""
        return sum(array.nbytes for array in self._adapter.values())

    @property
    def state(self):
        """The engine's state; what a pending commit keeps is still in its scratch slots."""
        return self.cache.state

    def prefill(self, tokens: Sequence[int], choose: Choose | None = None, reuse: int = 0) -> Proposal:
        """All but the last prompt token in chunks; the last one as a one-node tree with streams.

        The state is reused: masks hide what an earlier text left in it. Its first `reuse` positions, of
        those available, are kept: the caller knows that they are the prompt's.
        """
        check_prompt(self.limits, tokens)
        self.cache.length, self._last = reuse, None
        for start in range(reuse, len(tokens) - 1, self.functions.chunk):
            self._prefill_chunk(tokens[start : min(start + self.functions.chunk, len(tokens) - 1)])
        self._accepted = (self.cache.length, NOTHING, NOTHING)
        verified = self.step(root_only(int(tokens[-1])), choose)
        self.commit([0])
        return Proposal(int(verified.chosen[0]), verified.stream_logits)

    def step(self, tree: DraftTree, choose: Choose | None = None) -> Verified:
        """Verify a tree of at most N nodes (docs/method.md, One decoding step).

        Raises UserError for a tree that does not fit, or with `choose` where the package returns no logits.
        """
        if choose is not None and self.limits.greedy_only:
            raise UserError(
                f"{self.functions.package}: '{self.functions.step}' returns no logits to sample from; "
                f"convert it with --sampling"
            )
        check_tree(self.limits, tree, self.cache.length)
        outputs = self._run(self._step_engine, self.step_inputs(tree))
        self._last = _verified(tree, outputs, choose)
        # The call consumed the scratch rows of the step before.
        self._accepted = (self.cache.length, NOTHING, NOTHING)
        return self._last

    def commit(self, path: Sequence[int]) -> None:
        """Keep these nodes (root first) of the last tree."""
        if self._last is None:
            raise ValueError("commit needs a step before it")
        rows = kept_rows(self._last.kept, path)
        self._accepted = (self.cache.length, np.asarray(path, np.int32), rows)
        self.cache.length += len(path)
        self._last = None

    def step_inputs(self, tree: DraftTree) -> dict[str, np.ndarray]:
        """The step function's inputs for `tree`, the pending commit included."""
        size, context, count = self.limits.num_nodes, self.limits.context, tree.num_nodes
        length = self.cache.length
        slot, nodes, rows = self._accepted
        mask = np.full((size, context + size), MASKED, np.float16)
        mask[:count, :length] = 0
        mask[:, context:][tree.ancestor_mask(size)] = 0
        inputs = {
            # Padding repeats the root: any other id might have an all-zero embedding, a 0/0 in a norm.
            "tokens": _padded(tree.tokens, size, tree.tokens[0])[None],
            "positions": _padded(length + tree.depths, size, length),
            "parents": _padded(tree.parents, size, -1),
            "mask": mask,
            "commit_position": np.array([slot], np.int32),
            "commit_nodes": _padded(nodes, size, -1),
        }
        if self.limits.num_kept < size:
            inputs["commit_rows"] = _padded(rows, size, -1)
        if self.config.main_attends_streams:
            inputs["stream_gate"] = np.zeros(1, np.float16)
        return inputs | self._adapter

    def _prefill_chunk(self, tokens: Sequence[int]) -> None:
        size, context, length = self.functions.chunk, self.limits.context, self.cache.length
        mask = np.full((size, context + size), MASKED, np.float16)
        mask[:, :length] = 0
        mask[:, context:][np.tri(size, dtype=bool)] = 0
        inputs = {
            "tokens": _padded(np.asarray(tokens, np.int32), size, tokens[-1])[None],
            "position": np.array([length], np.int32),
            "mask": mask,
            **for_prefill(self._adapter),
        }
        self._run(self._prefill_engine, inputs)
        self.cache.length = self.cache.available = length + len(tokens)

    def _run(self, engine: Engine, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """One call; what was committed before it then lies in its slots."""
        self.cache.available = 0
        outputs = engine.predict(inputs, self.cache.state)
        self.cache.available = self.cache.length
        return outputs


def _verified(tree: DraftTree, outputs: Mapping[str, np.ndarray], choose: Choose | None) -> Verified:
    """A step's outputs without padding; of all nodes' streams those of the node where the walk ends."""
    kept = np.asarray(outputs["kept"], np.int32)
    kept = kept[kept < tree.num_nodes]  # padding is kept last
    chosen = np.asarray(outputs["chosen"], np.int32)[: len(kept)]
    accepted_node = int(np.asarray(outputs["accepted"]).reshape(()))
    logits, streams = outputs.get("logits"), np.asarray(outputs["stream_logits"])
    if logits is not None:
        logits = np.asarray(logits[: len(kept)], np.float32)
    if choose is not None:
        chosen = choose(kept, logits)
        accepted_node = walk(tree, kept, chosen)[-1]
    if streams.ndim == 3:
        streams = streams[int(np.searchsorted(kept, accepted_node))]
    return Verified(kept, chosen, accepted_node, np.asarray(streams, np.float32), logits)


def open_step_model(
    bundle: Bundle,
    adapter: BundledAdapter,
    functions: StepFunctions,
    engines: tuple[Engine, Engine],
) -> FunctionStepModel:
    """The adapter's functions behind one step model. engines: of prefill and step (`chained`)."""
    architecture, given = bundle.manifest.architecture, _adapter_inputs(bundle, adapter, functions)
    return FunctionStepModel(*engines, functions, adapter.config, architecture, given)


def _adapter_inputs(
    bundle: Bundle, adapter: BundledAdapter, functions: StepFunctions
) -> dict[str, np.ndarray]:
    """What functions that all adapters share are to be given for this one; {} where it has its own."""
    if functions.lora != "inputs":
        return {}
    return input_values(
        read_tensors(bundle.path / adapter.tensor_file),
        adapter.config,
        bundle.manifest.architecture,
        functions.lora_rank,
        functions.num_kept < functions.num_nodes,
    )


def chained(functions: StepFunctions, open_part: Callable[[int, str], Engine]) -> tuple[Engine, Engine]:
    """Engines of the prefill and the step function. open_part: (part, function) → the engine of one."""
    if not functions.chain:
        return open_part(0, functions.prefill), open_part(0, functions.step)
    parts = range(len(functions.chain))
    return (
        ChainedEngine(
            [open_part(part, functions.prefill) for part in parts], [e.prefill for e in functions.chain]
        ),
        ChainedEngine(
            [open_part(part, functions.step) for part in parts], [e.step for e in functions.chain]
        ),
    )


def _padded(values: np.ndarray, size: int, filler: int) -> np.ndarray:
    """int32 [size]: `values`, then `filler`."""
    out = np.full(size, filler, np.int32)
    out[: len(values)] = values
    return out
