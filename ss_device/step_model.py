"""The one contract of every back end (ARCHITECTURE.md): what a step model takes, answers and keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from ss_device.tree import DraftTree


@dataclass(frozen=True)
class StepLimits:
    """What a step model takes: nodes per step N, nodes kept K, streams γ, context C in tokens.

    greedy_only: tokens are chosen inside the graph, by argmax, and no logits come out. defers_streams: a
    step can leave the streams for later (`DeferringModel`). vocab_size: only ids below it may be fed (None:
    the model looks nothing up by them).
    """

    num_nodes: int
    num_kept: int
    num_streams: int
    context: int
    greedy_only: bool = False
    defers_streams: bool = False
    vocab_size: int | None = None


@dataclass(frozen=True)
class Proposal:
    """The next root token and the stream logits [γ, V] of the position that decided it."""

    root: int
    stream_logits: np.ndarray


class DeferredProposal:
    """A `Proposal` whose streams are computed when they are first read."""

    def __init__(self, root: int, streams: Callable[[], np.ndarray]) -> None:
        self.root, self._streams = root, streams

    @cached_property
    def stream_logits(self) -> np.ndarray:
        return self._streams()


@dataclass(frozen=True)
class Verified:
    """What one model call says of a tree.

    kept: int [K'], ascending ids of the nodes that survived pruning (all of the tree's without it);
    chosen: int [K'], the model's own next token at each; accepted_node: where the greedy walk
    ends; stream_logits: float [γ, V] of that node; logits: float [K', V] where a back end has them.
    """

    kept: np.ndarray
    chosen: np.ndarray
    accepted_node: int
    stream_logits: np.ndarray
    logits: np.ndarray | None = None


# Choices made outside the model: kept node ids [K'] and their logits [K', V] → the token at each, −1 at
# nodes that the walk does not reach.
Choose = Callable[[np.ndarray, np.ndarray], np.ndarray]


class StepModel(Protocol):
    """The one contract of every back end (ARCHITECTURE.md). Single sequence, one step in flight.

    `choose` replaces the argmax of the logits; a back end whose limits say `greedy_only` does not take it.
    Prompts and trees that do not fit the limits are a UserError (`step_checks`): no id outside the
    vocabulary and no position beyond the context reaches an array.
    """

    limits: StepLimits

    def prefill(self, tokens: Sequence[int], choose: Choose | None = None) -> Proposal:
        """Forget everything, take the prompt's tokens, return the first root and draft."""

    def step(self, tree: DraftTree, choose: Choose | None = None) -> Verified:
        """Verify a tree of at most `limits.num_nodes` nodes. Changes nothing until `commit`."""

    def commit(self, path: Sequence[int]) -> None:
        """Keep the keys and values of these nodes (root first) of the last tree, drop the others."""


class DeferringModel(StepModel, Protocol):
    """A step model that can put streams off (`limits.defers_streams`).

    `prefill` and `step` also take `defer=True`; the stream logits that they return are then empty, and
    `streams` gives those of the accepted node after its commit. A main stream that attends to streams
    cannot do that.
    """

    def streams(self) -> np.ndarray:
        """Stream logits [γ, V] of the last committed token. Changes nothing."""
