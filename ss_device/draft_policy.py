"""Drafts that pay: nodes and streams of every step chosen by expected tokens against measured seconds.

A generation that makes λ tokens per second loses λ·t tokens in t seconds. So of all drafts of a step the
best is the one with the most `expected tokens − λ · seconds`: a tree grows while its next node's
probability is above λ times what the node costs, plain decoding is the tree of one node, and the second
pass for the accepted node's streams is taken only where it is expected to bring more than it costs.

Probabilities are those of streams and copies (`ss_device.prompt_lookup`), corrected by how often nodes of
that probability were accepted before. What streams would bring is not known before they are computed: it
is remembered by how much the copies alone promise. Where streams do not pay they are tried again now and
then. Costs are a table, not a clock: the same prompts in the same order give the same drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ss_device.errors import UserError
from ss_device.prompt_lookup import CopyHistory, CopyTrust, PromptLookup, mixed_children
from ss_device.tree import DraftTree, ParentBias, grow_with_probabilities, root_only

# Expected accepted tokens of copies alone: the cells in which the gain of streams is remembered.
CELL_EDGES = (0.05, 0.3, 0.7, 1.5, 3.0)
NUM_CELLS = len(CELL_EDGES) + 1
NUM_BINS = 8  # halvings of a node's probability
STREAMS = ("when they pay", "always", "never")


@dataclass(frozen=True)
class StepCosts:
    """Measured seconds: of a step per tree size (`sizes`, ascending from 1), of the streams' own pass."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    streams: float

    def __post_init__(self) -> None:
        ascending = list(self.sizes) == sorted(set(self.sizes)) and self.sizes[:1] == (1,)
        if not ascending or len(self.sizes) != len(self.seconds):
            raise UserError("step costs need ascending tree sizes from 1 and as many times")
        if not (all(0 < s < float("inf") for s in self.seconds) and 0 <= self.streams < float("inf")):
            raise UserError("step costs must be positive seconds")

    def up_to(self, nodes: int) -> np.ndarray:
        """Seconds of trees of 1..nodes nodes, float64 [nodes], between the sizes on a straight line.

        Noise must not make a larger tree look cheaper than a smaller one.
        """
        never_falling = np.maximum.accumulate(self.seconds)
        return np.interp(np.arange(1, nodes + 1), self.sizes, never_falling)


@dataclass(frozen=True)
class Experience:
    """What earlier steps showed, the prior of later ones.

    rate: tokens per second by the table of costs; gains: per cell, tokens and seconds of a step drafted
    with streams, without the streams' own pass; copies, streams: accepted nodes per promised one, by
    halvings of the probability, without and with streams; trust: (token, ratio) of `CopyTrust`.
    """

    rate: float
    gains: tuple[tuple[float, float], ...]
    copies: tuple[float, ...] = (1.0,) * NUM_BINS
    streams: tuple[float, ...] = (1.0,) * NUM_BINS
    trust: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if len(self.gains) != NUM_CELLS or not {len(self.copies), len(self.streams)} == {NUM_BINS}:
            raise UserError(f"experience needs {NUM_CELLS} gains and twice {NUM_BINS} ratios")
        numbers = [self.rate, *self.copies, *self.streams, *(x for pair in self.gains for x in pair)]
        if not all(0 < x < float("inf") for x in numbers):
            raise UserError("experience must be positive numbers")


class Reliability:
    """How often nodes of a probability were accepted: a factor per halving of the probability."""

    PRIOR, MEMORY = 12.0, 0.995

    def __init__(self, ratios: Sequence[float]) -> None:
        self._promised = np.full(NUM_BINS, self.PRIOR)
        self._prior = self.PRIOR * np.array(ratios)
        self._accepted = self._prior.copy()

    @property
    def ratios(self) -> np.ndarray:
        """Accepted nodes per promised one, [bins]."""
        return self._accepted / self._promised

    def corrected(self, probabilities: np.ndarray) -> np.ndarray:
        """Probabilities [nodes] as they turned out to be."""
        return np.minimum(probabilities * self.ratios[self._bins(probabilities)], 1.0)

    def observe(self, probabilities: np.ndarray, accepted: np.ndarray) -> None:
        """Take a step's outcome: probabilities and bool [nodes], the root left out."""
        bins = self._bins(probabilities)
        for total, prior, values in (
            (self._accepted, self._prior, accepted),
            (self._promised, self.PRIOR, probabilities),
        ):
            total *= self.MEMORY
            total += (1 - self.MEMORY) * prior
            np.add.at(total, bins, values)

    def _bins(self, probabilities: np.ndarray) -> np.ndarray:
        return np.minimum(-np.log2(np.maximum(probabilities, 1e-9)), NUM_BINS - 1).astype(int)


class StreamGains:
    """Tokens and seconds of steps drafted with streams, by cell: means over the last ones and a prior."""

    PRIOR_WEIGHT, MEMORY = 12.0, 48.0

    def __init__(self, prior: Sequence[Sequence[float]]) -> None:
        self._prior = np.array(prior, float)
        self._mean, self._weight = self._prior.copy(), np.zeros(NUM_CELLS)

    def mean(self, cell: int) -> tuple[float, float]:
        """Expected tokens and seconds of a step, without the streams' own pass."""
        weight, fixed = self._weight[cell], self.PRIOR_WEIGHT
        tokens, seconds = (weight * self._mean[cell] + fixed * self._prior[cell]) / (weight + fixed)
        return float(tokens), float(seconds)

    def observe(self, cell: int, tokens: int, seconds: float) -> None:
        weight = self._weight[cell] = min(self._weight[cell] + 1, self.MEMORY)
        self._mean[cell] += (np.array([tokens, seconds]) - self._mean[cell]) / weight


@dataclass
class _Draft:
    """A tree that waits for its outcome. probabilities [nodes] before correction; cell None: no streams."""

    tree: DraftTree
    probabilities: np.ndarray
    expected: float
    seconds: float
    cell: int | None


class AdaptiveDrafter:
    """A drafter for `decode` that chooses size and streams of every step; it learns over generations.

    num_nodes: largest tree. costs, experience: measured by `ss-bench tune`. streams: `when they pay`;
    `always` and `never` are for measuring what they bring. A step model that cannot put streams off pays
    for them in any case, and they are used.
    """

    defers_streams = True
    PROBE_AFTER = 32  # steps without streams in a cell after which they are tried again
    RATE_MEMORY = 0.98

    def __init__(
        self,
        num_nodes: int,
        costs: StepCosts,
        experience: Experience,
        parent_bias: ParentBias | None = None,
        lookup: PromptLookup | None = None,
        streams: str = "when they pay",
    ) -> None:
        if num_nodes < 1:
            raise UserError(f"a tree needs at least 1 node, not {num_nodes}")
        if streams not in STREAMS:
            raise UserError(f"streams '{streams}' is not one of {', '.join(STREAMS)}")
        self.num_nodes, self.costs, self._streams = num_nodes, costs, streams
        self.use_streams = streams != "never"
        self._bias, self._lookup = parent_bias, lookup or PromptLookup()
        self._seconds = costs.up_to(num_nodes)
        self._slopes = self._least_slopes()
        self._gains = StreamGains(experience.gains)
        self._reliable = {False: Reliability(experience.copies), True: Reliability(experience.streams)}
        self._trust = CopyTrust(dict(experience.trust))
        self._skipped = np.zeros(NUM_CELLS, int)
        self._tokens, self._spent = experience.rate, 1.0  # of the last steps, forgotten slowly
        self._no_logits = np.zeros((0, 0), np.float32)

    def experience(self) -> Experience:
        """What the steps until now showed."""
        return Experience(
            rate=self.rate,
            gains=tuple(self._gains.mean(cell) for cell in range(NUM_CELLS)),
            copies=tuple(self._reliable[False].ratios.tolist()),
            streams=tuple(self._reliable[True].ratios.tolist()),
            trust=tuple(sorted(self._trust.ratios().items())),
        )

    @property
    def rate(self) -> float:
        """λ: tokens per second by the table of costs."""
        return self._tokens / self._spent

    def _least_slopes(self) -> np.ndarray:
        """Seconds per node of the cheapest way to enlarge a tree of 1, 2, … nodes, float64 [num_nodes]."""
        seconds, found = self._seconds, np.full(self.num_nodes, np.inf)
        for size in range(1, self.num_nodes):
            more = np.arange(1, self.num_nodes - size + 1)
            found[size - 1] = np.min((seconds[size:] - seconds[size - 1]) / more)
        return found

    def start(self, prompt: Sequence[int]) -> _Generation:
        """The history of one generation, which the loop extends."""
        return _Generation(self, CopyHistory(self._lookup, prompt, self._trust))

    def grow(self, proposal, stop_ids: frozenset[int], max_depth: int, history: _Generation) -> DraftTree:
        """The step's tree below `proposal.root`; reads the proposal's streams only where they pay."""
        if max_depth <= 0 or self.num_nodes == 1:
            return root_only(proposal.root)
        copies = self._draft(proposal.root, self._no_logits, stop_ids, max_depth, history, None)
        cell = int(np.searchsorted(CELL_EDGES, copies.expected))
        draft = copies
        if self._streams_pay(copies, cell):
            logits = proposal.stream_logits
            if len(logits):
                draft = self._draft(proposal.root, logits, stop_ids, max_depth, history, cell)
        history.pending = draft
        return draft.tree

    def _streams_pay(self, copies: _Draft, cell: int) -> bool:
        if self._streams != "when they pay":
            return self._streams == "always"
        tokens, seconds = self._gains.mean(cell)
        with_streams = tokens - self.rate * (seconds + self.costs.streams)
        if with_streams > 1 + copies.expected - self.rate * copies.seconds:
            return True
        self._skipped[cell] += 1
        return bool(self._skipped[cell] % self.PROBE_AFTER == 0)

    def _draft(self, root, logits, stop_ids, max_depth, history: _Generation, cell: int | None) -> _Draft:
        """The tree with the most expected tokens − λ · seconds."""
        copies = history.copies
        # Behind this many nodes none pays that lies below λ times the cheapest way to add more; the
        # margin is for probabilities that are corrected upwards.
        least = np.minimum(0.5, 0.7 * self.rate * self._slopes)
        children = mixed_children(logits, copies, self._bias, self.num_nodes, float(least.min()))
        deepest = min(max_depth, self._lookup.max_depth)
        tree, found = grow_with_probabilities(root, self.num_nodes, children, stop_ids, deepest, least)
        probabilities = self._reliable[cell is not None].corrected(found[1:])
        expected = np.concatenate([[0.0], np.cumsum(probabilities)])
        best = int(np.argmax(expected - self.rate * self._seconds[: tree.num_nodes]))
        size = best + 1
        return _Draft(tree.first(size), found[:size], float(expected[best]), self._seconds[best], cell)

    def observe(self, draft: _Draft, tokens: Sequence[int]) -> None:
        """Take a draft's outcome: the tokens that its step emitted."""
        spent = draft.seconds + (self.costs.streams if draft.cell is not None else 0.0)
        self._tokens = self.RATE_MEMORY * self._tokens + len(tokens)
        self._spent = self.RATE_MEMORY * self._spent + spent
        accepted = np.zeros(draft.tree.num_nodes, bool)
        node = 0
        for token in tokens[:-1]:
            node = next(c for c in draft.tree.children(node) if draft.tree.tokens[c] == token)
            accepted[node] = True
        self._reliable[draft.cell is not None].observe(draft.probabilities[1:], accepted[1:])
        if draft.cell is not None:
            self._gains.observe(draft.cell, len(tokens), draft.seconds)


class _Generation:
    """One generation's text for the drafter: what copies are taken from, and the draft that is out."""

    def __init__(self, drafter: AdaptiveDrafter, copies: CopyHistory) -> None:
        self.copies = copies
        self.pending: _Draft | None = None
        self._drafter = drafter

    def extend(self, tokens: Sequence[int]) -> None:
        if self.pending is not None:
            self._drafter.observe(self.pending, tokens)
            self.pending = None
        self.copies.extend(tokens)
