"""The decoding loop: propose → step → accept → commit, over any step model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ss_device.acceptance import walk
from ss_device.errors import UserError
from ss_device.tree import DraftTree, ParentBias, best_first_tree, k_ary_tree, root_only


@dataclass(frozen=True)
class StepLimits:
    """What a step model takes: nodes per step N, nodes kept K, streams γ, context C in tokens."""

    num_nodes: int
    num_kept: int
    num_streams: int
    context: int


@dataclass(frozen=True)
class Proposal:
    """The next root token and the stream logits [γ, V] of the position that decided it."""

    root: int
    stream_logits: np.ndarray


@dataclass(frozen=True)
class Verified:
    """What one model call says of a tree.

    kept: int [K'], ascending ids of the nodes that survived pruning (all of the tree's without it);
    chosen: int [K'], the model's own next token at each; accepted: the node where the greedy walk
    ends; stream_logits: float [γ, V] of that node; logits: float [K', V] where a back end has them.
    """

    kept: np.ndarray
    chosen: np.ndarray
    accepted: int
    stream_logits: np.ndarray
    logits: np.ndarray | None = None


class StepModel(Protocol):
    """The one contract of every back end (ARCHITECTURE.md). Single sequence, one step in flight."""

    limits: StepLimits

    def prefill(self, tokens: Sequence[int]) -> Proposal:
        """Forget everything, take the prompt's tokens, return the first root and draft."""

    def step(self, tree: DraftTree) -> Verified:
        """Verify a tree of at most `limits.num_nodes` nodes. Changes nothing until `commit`."""

    def commit(self, path: Sequence[int]) -> None:
        """Keep the keys and values of these nodes (root first) of the last tree, drop the others."""


@dataclass(frozen=True)
class Drafter:
    """How a tree is grown from stream logits. `num_nodes` 1 is plain decoding.

    shape: `best-first`, `chain` (1 + depth nodes, each the best child) or `k-ary` (the papers').
    """

    num_nodes: int
    shape: str = "best-first"
    top_k: int = 3
    parent_bias: ParentBias | None = None

    def __post_init__(self) -> None:
        if self.shape not in ("best-first", "chain", "k-ary"):
            raise UserError(f"tree shape '{self.shape}' is not best-first, chain or k-ary")
        if self.num_nodes < 1:
            raise UserError(f"a tree needs at least 1 node, not {self.num_nodes}")

    def grow(self, proposal: Proposal, stop_ids: frozenset[int], max_depth: int) -> DraftTree:
        """The draft tree below `proposal.root`, at most `max_depth` deep, nothing below stop ids."""
        root, logits = proposal.root, proposal.stream_logits
        if self.num_nodes == 1 or max_depth <= 0:
            return root_only(root)
        if self.shape == "k-ary":
            return k_ary_tree(root, logits, self.top_k, self.num_nodes, stop_ids, max_depth)
        children = 1 if self.shape == "chain" else 64
        return best_first_tree(
            root, logits, self.num_nodes, self.parent_bias, stop_ids, max_depth, children
        )


@dataclass(frozen=True)
class Step:
    """One model call's outcome. The prefill's has no tree: its one token is the first root.

    tokens: emitted by this call; `num_drafted` of them, from the front, were accepted draft tokens,
    the last one is the model's own. finish_reason: None, `stop` or `length`.
    """

    tokens: list[int]
    num_drafted: int
    tree: DraftTree | None = None
    verified: Verified | None = None
    path: tuple[int, ...] = ()
    finish_reason: str | None = None


def decode(
    model: StepModel,
    drafter: Drafter,
    prompt: Sequence[int],
    max_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
) -> Iterator[Step]:
    """Generate greedily from `prompt` (token ids), yielding one Step per model call.

    The text ends with a stop id (included), after `max_tokens`, or when the context is full. Raises
    UserError for a prompt that leaves no room or a drafter larger than the model's step.
    """
    limits = model.limits
    check_request(limits, drafter.num_nodes, len(prompt), max_tokens)
    # The cache holds every token but the newest one, so context - len(prompt) + 1 can be generated.
    budget = min(max_tokens, limits.context - len(prompt) + 1)
    proposal = model.prefill(prompt)
    emitted, reason = _trim([proposal.root], budget, stop_ids)
    yield Step(tokens=emitted, num_drafted=0, finish_reason=reason)
    left = budget - len(emitted)
    while reason is None:
        tree = drafter.grow(proposal, stop_ids, left - 1)
        verified = model.step(tree)
        path = walk(tree, verified.kept, verified.chosen)
        if path[-1] != verified.accepted:
            raise RuntimeError(f"the model accepted node {verified.accepted}, the walk {path[-1]}")
        correction = int(verified.chosen[np.searchsorted(verified.kept, path[-1])])
        new = [int(tree.tokens[n]) for n in path[1:]] + [correction]
        emitted, reason = _trim(new, left, stop_ids)
        left -= len(emitted)
        model.commit(path)
        yield Step(
            tokens=emitted,
            num_drafted=min(len(emitted), len(path) - 1),
            tree=tree,
            verified=verified,
            path=tuple(path),
            finish_reason=reason,
        )
        proposal = Proposal(correction, verified.stream_logits)


def check_request(limits: StepLimits, num_nodes: int, prompt_length: int, max_tokens: int) -> None:
    """Raise UserError when a request does not fit the model's limits."""
    if num_nodes > limits.num_nodes:
        raise UserError(f"{num_nodes} nodes asked for, this model takes at most {limits.num_nodes}")
    if prompt_length < 1:
        raise UserError("the prompt is empty: at least one token is needed")
    if prompt_length > limits.context:
        raise UserError(f"the prompt has {prompt_length} tokens, the context holds {limits.context}")
    if max_tokens < 1:
        raise UserError(f"max tokens must be at least 1, not {max_tokens}")


def _trim(tokens: list[int], limit: int, stop_ids: frozenset[int]) -> tuple[list[int], str | None]:
    """Cut after the first stop id and at `limit` tokens; the reason if either ended the text."""
    for index, token in enumerate(tokens[:limit]):
        if token in stop_ids:
            return tokens[: index + 1], "stop"
    return (tokens[:limit], "length") if len(tokens) >= limit else (tokens, None)
