"""The decoding loop: propose → step → accept → commit, over any step model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ss_device.acceptance import walk
from ss_device.errors import UserError
from ss_device.prompt_lookup import NgramHistory, PromptLookup, lookup_tree
from ss_device.sampling import Sampler
from ss_device.step_checks import check_prompt
from ss_device.step_model import DeferredProposal, Proposal, StepLimits, StepModel, Verified
from ss_device.tree import BigramBias, DraftTree, best_first_tree, k_ary_tree, root_only
from ss_device.tree_choice import choose_on_tree

SHAPES = ("best-first", "chain", "k-ary")


@dataclass(frozen=True)
class Drafter:
    """How a tree is grown from stream logits. `num_nodes` 1 is plain decoding.

    shape: `best-first`, `chain` (1 + depth nodes, each the best child) or `k-ary` (the papers').
    max_streams: draft with the first γ' streams only (docs/method.md, Invariants).
    lookup: n-grams of prompt and output compete for the nodes (not in a k-ary tree); use_streams False
    leaves the nodes to them alone.
    """

    num_nodes: int
    shape: str = "best-first"
    tree_top_k: int = 3
    bigram_bias: BigramBias | None = None
    max_streams: int | None = None
    lookup: PromptLookup | None = None
    use_streams: bool = True

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise UserError(f"tree shape '{self.shape}' is not {', '.join(SHAPES[:-1])} or {SHAPES[-1]}")
        if self.num_nodes < 1:
            raise UserError(f"a tree needs at least 1 node, not {self.num_nodes}")
        if self.lookup and self.shape == "k-ary":
            raise UserError("prompt lookup needs a best-first tree or a chain, not a k-ary tree")
        if not self.use_streams and not self.lookup:
            raise UserError("a drafter without streams needs prompt lookup")

    @property
    def defers_streams(self) -> bool:
        """Whether streams may be left out: no tree of this drafter reads them."""
        return self.num_nodes == 1 or not self.use_streams

    def start(self, prompt: Sequence[int]) -> NgramHistory | None:
        """The history of one generation, which the loop extends; None where none is needed."""
        return NgramHistory(self.lookup, prompt) if self.lookup and self.num_nodes > 1 else None

    def grow(
        self,
        proposal: Proposal,
        stop_ids: frozenset[int],
        max_depth: int,
        history: NgramHistory | None = None,
    ) -> DraftTree:
        """The draft tree below `proposal.root`, at most `max_depth` deep, nothing below stop ids.

        history: the generation's text up to the root, from `start`.
        """
        root = proposal.root
        if self.num_nodes == 1 or max_depth <= 0:
            return root_only(root)
        logits = proposal.stream_logits[: self.max_streams] if self.use_streams else np.zeros((0, 0))
        if self.shape == "k-ary":
            return k_ary_tree(root, logits, self.tree_top_k, self.num_nodes, stop_ids, max_depth)
        children = 1 if self.shape == "chain" else 64
        if history is not None:
            return lookup_tree(
                root, logits, self.num_nodes, history, self.bigram_bias, stop_ids, max_depth, children
            )
        return best_first_tree(
            root, logits, self.num_nodes, self.bigram_bias, stop_ids, max_depth, children
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
    sampler: Sampler | None = None,
) -> Iterator[Step]:
    """Generate from `prompt` (token ids), yielding one Step per model call; greedily without a sampler.

    The text ends with a stop id (included), after `max_tokens`, or when the context is full. Raises
    UserError for a prompt that leaves no room or holds an id outside the vocabulary, a drafter larger than
    the model's step, or a sampler where the back end gives no logits.
    """
    limits = model.limits
    check_request(limits, drafter.num_nodes, len(prompt), max_tokens, sampler)
    check_prompt(limits, prompt)
    # The cache holds every token but the newest one, so context - len(prompt) + 1 can be generated.
    budget = min(max_tokens, limits.context - len(prompt) + 1)
    history = drafter.start(prompt)
    text = [int(token) for token in prompt]
    defer = limits.defers_streams and getattr(drafter, "defers_streams", False)
    proposal = _prefill(model, text, sampler, defer)
    emitted, reason = _trim([proposal.root], budget, stop_ids)
    yield Step(tokens=emitted, num_drafted=0, finish_reason=reason)
    left = budget - len(emitted)
    while reason is None:
        text.extend(emitted)
        if history is not None:
            history.extend(emitted)
        tree = drafter.grow(proposal, stop_ids, left - 1, history)
        verified = _step(model, tree, text, sampler, defer)
        path, new = _accepted(tree, verified)
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
        proposal = _proposal(model, new[-1], verified.stream_logits, defer)


def _accepted(tree: DraftTree, verified: Verified) -> tuple[list[int], list[int]]:
    """The accepted nodes, root first, and the new tokens: the drafted ones and the model's own."""
    path = walk(tree, verified.kept, verified.chosen)
    if path[-1] != verified.accepted_node:
        raise RuntimeError(f"the model accepted node {verified.accepted_node}, the walk {path[-1]}")
    correction = int(verified.chosen[np.searchsorted(verified.kept, path[-1])])
    return path, [int(tree.tokens[n]) for n in path[1:]] + [correction]


def _proposal(model: StepModel, root: int, stream_logits: np.ndarray, defer: bool):
    return DeferredProposal(root, model.streams) if defer else Proposal(root, stream_logits)


def _prefill(model: StepModel, prompt: list[int], sampler: Sampler | None, defer: bool):
    options = {"defer": True} if defer else {}
    if sampler is not None:
        options["choose"] = lambda kept, logits: np.array([sampler(logits[0], prompt)], np.int32)
    proposal = model.prefill(prompt, **options)
    return _proposal(model, proposal.root, proposal.stream_logits, defer)


def _step(
    model: StepModel, tree: DraftTree, text: list[int], sampler: Sampler | None, defer: bool
) -> Verified:
    """One step; with a sampler the walk asks it at the nodes that it reaches. text ends with the root."""
    options = {"defer": True} if defer else {}
    if sampler is None:
        return model.step(tree, **options)

    def choose(kept: np.ndarray, logits: np.ndarray) -> np.ndarray:
        return choose_on_tree(sampler, tree, text, kept, logits)

    return model.step(tree, choose=choose, **options)


def check_request(
    limits: StepLimits,
    num_nodes: int,
    prompt_length: int,
    max_tokens: int,
    sampler: Sampler | None = None,
) -> None:
    """Raise UserError when a request does not fit the model's limits."""
    if sampler is not None and limits.greedy_only:
        raise UserError("this back end chooses greedily inside its graph: no sampling and no penalties")
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
