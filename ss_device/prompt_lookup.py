"""Prompt lookup: what followed the recent tokens earlier in prompt or output competes for draft nodes.

A node's continuations are predicted twice, by its stream and by prompt lookup, and the two are mixed as in
interpolated back-off (Jelinek and Mercer 1980; prediction by partial matching): with `s_n(x)` the share
of x among what followed the last n tokens before, and `w_n` the probability that this predicts right,

    p_0(x) = the stream's probability (0 below the last stream)
    p_n(x) = w_n · s_n(x) + (1 − w_n) · p_{n−1}(x)        for every n that has a match

w_n starts from a prior and follows the output as it is generated: every new token shows whether a match
predicted it, drafted or not. Prompt lookup knows no last stream, so a long match may be drafted deeper than
γ. The text before a node includes the node's own path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ss_device.errors import UserError
from ss_device.tree import (
    BigramBias,
    DraftTree,
    StreamChildren,
    grow_best_first,
    root_only,
    tree_from_parents,
)


@dataclass(frozen=True)
class PromptLookup:
    """Settings of prompt lookup.

    max_match: longest suffix that is compared, in tokens; max_depth: deepest node (n-gram drafts go below
    the last stream); prior_strength: how many observations the prior of w_n counts for. The prior is
    n / (n + 3): longer matches are more often right.
    """

    max_match: int = 6
    max_depth: int = 32
    prior_strength: float = 16.0

    def __post_init__(self) -> None:
        for name in ("max_match", "max_depth"):
            if getattr(self, name) < 1:
                raise UserError(f"prompt lookup: {name} {getattr(self, name)} must be at least 1")
        if not self.prior_strength > 0:
            raise UserError(f"prompt lookup: prior_strength {self.prior_strength} must be above 0")


class NgramTrust:
    """How reliable an n-gram draft of each token is: how often it was right per time it was promised.

    A type name in a table's definition is never part of the query, however long the match before it. Kept
    over generations; ratios: from earlier ones.
    """

    PRIOR, MEMORY = 1.0, 24.0  # in promised tokens
    MOST = 0.98  # what n-gram drafts promise together at most

    def __init__(self, ratios: Mapping[int, float] | None = None) -> None:
        promised = self.MEMORY / 2
        self._counts = {token: (ratio * promised, promised) for token, ratio in (ratios or {}).items()}

    def ratio(self, token: int) -> float:
        right, promised = self._counts.get(token, (0.0, 0.0))
        return (right + self.PRIOR) / (promised + self.PRIOR)

    def ratios(self) -> dict[int, float]:
        """Of all tokens that were promised at least twice."""
        return {token: self.ratio(token) for token, (_, promised) in self._counts.items() if promised >= 2}

    def observe(self, promised: Mapping[int, float], token: int) -> None:
        """promised: {token: probability} without trust; token: what came."""
        for drafted, probability in promised.items():
            right, total = self._counts.get(drafted, (0.0, 0.0))
            right, total = right + (drafted == token), total + probability
            forget = min(1.0, self.MEMORY / total)
            self._counts[drafted] = right * forget, total * forget

    def correct(self, promised: dict[int, float]) -> tuple[dict[int, float], float]:
        """Probabilities as they turned out to be, and what is left for other tokens."""
        corrected = {token: p * self.ratio(token) for token, p in promised.items()}
        total = sum(corrected.values())
        if total > self.MOST:
            return {token: p * self.MOST / total for token, p in corrected.items()}, 1.0 - self.MOST
        return corrected, 1.0 - total


class NgramHistory:
    """The text of one generation, indexed by its n-grams, and how often they predicted right.

    prompt: token ids, indexed but not counted as evidence. Memory is one entry per token and order.
    trust: corrects the probabilities by token, and learns (None: neither).
    """

    def __init__(
        self, settings: PromptLookup, prompt: Sequence[int], trust: NgramTrust | None = None
    ) -> None:
        self.settings, self._trust = settings, trust
        orders = range(settings.max_match + 1)
        self._followers: list[dict[tuple[int, ...], dict[int, int]]] = [{} for _ in orders]
        self._right = [settings.prior_strength * n / (n + 3) for n in orders]
        self._seen = [settings.prior_strength for _ in orders]
        self._recent: tuple[int, ...] = ()
        for token in prompt:
            self._index(int(token))

    def extend(self, tokens: Sequence[int]) -> None:
        """Take generated tokens: each one first shows whether prompt lookup would have been right."""
        for token in tokens:
            if self._trust is not None:
                self._trust.observe(self._promise(())[0], int(token))
            for order, followers in self._matches(()):
                self._seen[order] += 1
                self._right[order] += followers.get(int(token), 0) / sum(followers.values())
            self._index(int(token))

    def weight(self, order: int) -> float:
        """w_n: estimated probability that a match of `order` tokens predicts right."""
        return self._right[order] / self._seen[order]

    def predict(self, path: Sequence[int]) -> tuple[dict[int, float], float]:
        """Tokens after the text followed by `path`: {token: probability} and what is left for p_0."""
        promised, left = self._promise(path)
        return self._trust.correct(promised) if self._trust is not None and promised else (promised, left)

    def _promise(self, path: Sequence[int]) -> tuple[dict[int, float], float]:
        promised: dict[int, float] = {}
        left = 1.0
        for order, followers in self._matches(path):
            weight = self.weight(order)
            share = left * weight / sum(followers.values())
            for token, count in followers.items():
                promised[token] = promised.get(token, 0.0) + share * count
            left *= 1.0 - weight
        return promised, left

    def _matches(self, path: Sequence[int]):
        """(order, {token: count}) of every suffix that was followed by something, longest first."""
        context = (*self._recent, *path)[-self.settings.max_match :]
        for order in range(len(context), 0, -1):
            if followers := self._followers[order].get(context[-order:]):
                yield order, followers

    def _index(self, token: int) -> None:
        for order in range(1, len(self._recent) + 1):
            followers = self._followers[order].setdefault(self._recent[-order:], {})
            followers[token] = followers.get(token, 0) + 1
        self._recent = (*self._recent, token)[-self.settings.max_match :]


def lookup_tree(
    root: int,
    stream_logits: np.ndarray,
    num_nodes: int,
    history: NgramHistory,
    bigram_bias: BigramBias | None = None,
    stop_ids: frozenset[int] = frozenset(),
    max_depth: int | None = None,
    max_children: int = 64,
) -> DraftTree:
    """`best_first_tree` under the mixture of streams and n-grams; the same rules of ties and stop ids.

    stream_logits: [γ, V], γ = 0 for n-grams alone. history ends before `root`'s children, root included.
    Where nothing matches, a node's children are exactly those of `best_first_tree`.
    """
    limit = history.settings.max_depth if max_depth is None else min(max_depth, history.settings.max_depth)
    children = mixed_children(stream_logits, history, bigram_bias, min(max_children, num_nodes))
    return grow_best_first(root, num_nodes, children, stop_ids, limit)


def mixed_children(
    stream_logits: np.ndarray,
    history: NgramHistory,
    bigram_bias: BigramBias | None,
    count: int,
    least: float = 0.0,
) -> Callable[[tuple[int, ...]], tuple[Sequence[int], Sequence[float]]]:
    """A function: path (root first) → the best `count` child ids and their log-probabilities.

    Children of less than `least` may be missing.
    """
    streams = StreamChildren(stream_logits, bigram_bias, count, least)
    nothing: tuple[Sequence[int], Sequence[float]] = ((), ())

    def ranked(path: tuple[int, ...]) -> tuple[Sequence[int], Sequence[float]]:
        has_stream = len(path) <= len(stream_logits)
        promised, left = history.predict(path[1:])
        if not promised:
            return streams(path) if has_stream else nothing
        mixed = dict(promised)
        if has_stream:
            # A token that no n-gram promises keeps its rank among the streams' own: their best are enough.
            tokens = list({*streams(path)[0].tolist(), *promised})
            drafted = np.exp(streams.log_probs(path, tokens)).tolist()
            for token, probability in zip(tokens, drafted, strict=True):
                mixed[token] = mixed.get(token, 0.0) + left * probability
        best = sorted([(-p, token) for token, p in mixed.items() if p > 0 and p >= least])[:count]
        return [token for _, token in best], [math.log(-p) for p, _ in best]

    return ranked


@dataclass(frozen=True)
class PromptLookupChain:
    """Plain prompt lookup (Saxena 2023), a baseline: no streams, one chain, no probabilities.

    The longest suffix of at most `max_match` tokens is searched in prompt and output; what followed its
    most recent earlier occurrence is the draft, `num_nodes` − 1 tokens at most. A drafter for `decode`.
    """

    num_nodes: int = 11
    max_match: int = 3
    defers_streams: ClassVar[bool] = True

    def start(self, prompt: Sequence[int]) -> TokenHistory:
        return TokenHistory(prompt)

    def grow(self, proposal, stop_ids: frozenset[int], max_depth: int, history: TokenHistory) -> DraftTree:
        """The chain below `proposal.root`, at most `max_depth` deep, cut after a stop id."""
        draft: list[int] = []
        if proposal.root not in stop_ids:
            for token in history.continuation(self.max_match, min(self.num_nodes - 1, max_depth)):
                draft.append(token)
                if token in stop_ids:
                    break
        if not draft:
            return root_only(proposal.root)
        return tree_from_parents([proposal.root, *draft], range(-1, len(draft)))


class TokenHistory:
    """Prompt and output as one list."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens = [int(token) for token in prompt]

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens.extend(int(token) for token in tokens)

    def continuation(self, max_match: int, length: int) -> list[int]:
        """At most `length` tokens after the latest earlier match of the longest suffix."""
        tokens = self._tokens
        for order in range(min(max_match, len(tokens) - 1), 0, -1):
            suffix = tokens[-order:]
            for start in range(len(tokens) - order - 1, -1, -1):
                if tokens[start : start + order] == suffix:
                    return tokens[start + order : start + order + max(length, 0)]
        return []
