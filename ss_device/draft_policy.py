"""Drafts that pay: nodes and streams of every step chosen by expected tokens against measured seconds.

A generation that makes λ tokens per second loses λ·t tokens in t seconds. So of all drafts of a step the
best is the one with the most `expected tokens − λ · seconds`: a tree grows while its next node's
probability is above λ times what the node costs, plain decoding is the tree of one node, and the second
pass for the accepted node's streams is taken only where it is expected to bring more than it costs.

Probabilities are those of streams and n-grams (`ss_device.prompt_lookup`), corrected by how often nodes of
that probability were accepted before. Streams of an earlier step that reach below the text's end draft
for nothing. What fresh ones would bring is not known before they are computed: it is remembered by how
much the free draft promises. Where they do not pay they are tried again now and then. Costs are a table,
not a clock: the same prompts in the same order give the same drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ss_device.errors import UserError
from ss_device.prompt_lookup import NgramHistory, NgramTrust, PromptLookup, mixed_children
from ss_device.tree import BigramBias, DraftTree, grow_with_probabilities, root_only

# Expected accepted tokens of the free draft: the cells in which the gain of streams is remembered.
CELL_EDGES = (0.05, 0.3, 0.7, 1.5, 3.0)
NUM_CELLS = len(CELL_EDGES) + 1
NUM_BINS = 8  # halvings of a node's probability
KINDS = ("lookup", "leftover", "streams")
NO_LOGITS = np.zeros((0, 0), np.float32)
STREAMS = ("when they pay", "always", "never")
MOST_SECONDS = 1e4  # of a step


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
        if not (all(0 < s < MOST_SECONDS for s in self.seconds) and 0 <= self.streams < MOST_SECONDS):
            raise UserError(f"step costs must be positive seconds below {MOST_SECONDS:.0f}")

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
    with streams, without the streams' own pass; lookup, leftover, streams: accepted nodes per promised
    one, by halvings of the probability, drafted with no streams, those of an earlier step, fresh ones;
    trust: (token, ratio) of `NgramTrust`.
    """

    rate: float
    gains: tuple[tuple[float, float], ...]
    lookup: tuple[float, ...] = (1.0,) * NUM_BINS
    leftover: tuple[float, ...] = (1.0,) * NUM_BINS
    streams: tuple[float, ...] = (1.0,) * NUM_BINS
    trust: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        ratios = [self.lookup, self.leftover, self.streams]
        if len(self.gains) != NUM_CELLS or {len(some) for some in ratios} != {NUM_BINS}:
            raise UserError(f"experience needs {NUM_CELLS} gains and three times {NUM_BINS} ratios")
        numbers = [self.rate, *(x for some in (*ratios, *self.gains) for x in some)]
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
            total += np.bincount(bins, values, NUM_BINS)

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
    """A tree that waits for its outcome. kind: `lookup`, `leftover` or `streams`, as in `Experience`;
    logits [γ', V] of the streams that it was drawn with; probabilities [nodes] before correction."""

    kind: str
    logits: np.ndarray
    tree: DraftTree
    probabilities: np.ndarray
    expected: float
    seconds: float
    cell: int = 0  # of the free draft, where fresh streams replaced it


class AdaptiveDrafter:
    """A drafter for `decode` that chooses size and streams of every step; it learns over generations.

    num_nodes: largest tree. costs, experience: measured by `ss-bench tune`. streams: `when they pay`;
    `always` and `never` are for measuring what they bring. A step model that cannot defer streams pays
    for them in any case, and they are used.
    """

    defers_streams = True
    NODE_SECONDS = 4e-5  # of the host's drawing a node: a table of costs that is flat gives none away
    PROBE_AFTER = 32  # steps without streams in a cell after which they are tried again
    RATE_MEMORY = 0.98

    def __init__(
        self,
        num_nodes: int,
        costs: StepCosts,
        experience: Experience,
        bigram_bias: BigramBias | None = None,
        lookup: PromptLookup | None = None,
        streams: str = "when they pay",
    ) -> None:
        if num_nodes < 1:
            raise UserError(f"a tree needs at least 1 node, not {num_nodes}")
        if streams not in STREAMS:
            raise UserError(f"streams '{streams}' is not one of {', '.join(STREAMS)}")
        self.num_nodes, self.costs, self._streams = num_nodes, costs, streams
        self.use_streams = streams != "never"
        self._bias, self._lookup = bigram_bias, lookup or PromptLookup()
        self._seconds = costs.up_to(num_nodes)
        self._slopes = self._least_slopes()
        self._gains = StreamGains(experience.gains)
        self._reliable = {kind: Reliability(getattr(experience, kind)) for kind in KINDS}
        self._trust = NgramTrust(dict(experience.trust))
        self._generation: _Generation | None = None
        self._skipped = np.zeros(NUM_CELLS, int)
        self._tokens, self._spent = experience.rate, 1.0  # of the last steps, forgotten slowly

    def experience(self) -> Experience:
        """What the steps until now showed."""
        return Experience(
            rate=self.rate,
            gains=tuple(self._gains.mean(cell) for cell in range(NUM_CELLS)),
            **{kind: tuple(self._reliable[kind].ratios.tolist()) for kind in KINDS},
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
            found[size - 1] = np.min((seconds[size:] - seconds[size - 1]) / more) + self.NODE_SECONDS
        return found

    def start(self, prompt: Sequence[int]) -> _Generation:
        """The history of one generation, which the loop extends. One generation at a time."""
        if self._generation is not None:
            self._generation.finish()
        self._generation = _Generation(self, NgramHistory(self._lookup, prompt, self._trust))
        return self._generation

    def grow(self, proposal, stop_ids: frozenset[int], max_depth: int, history: _Generation) -> DraftTree:
        """The step's tree below `proposal.root`; reads the proposal's streams only where they pay."""
        if max_depth <= 0 or self.num_nodes == 1:
            return root_only(proposal.root)
        kind = "leftover" if len(history.leftover) else "lookup"
        draft = self._draft(kind, proposal.root, history.leftover, stop_ids, max_depth, history.ngrams)
        cell = int(np.searchsorted(CELL_EDGES, draft.expected))
        if self._streams_pay(draft, cell) and len(fresh := proposal.stream_logits):
            draft = self._draft("streams", proposal.root, fresh, stop_ids, max_depth, history.ngrams)
            draft.cell = cell
        history.pending = draft
        return draft.tree

    def _streams_pay(self, free: _Draft, cell: int) -> bool:
        if self._streams != "when they pay":
            return self._streams == "always"
        tokens, seconds = self._gains.mean(cell)
        with_streams = tokens - self.rate * (seconds + self.costs.streams)
        if with_streams > 1 + free.expected - self.rate * free.seconds:
            return True
        self._skipped[cell] += 1
        return bool(self._skipped[cell] % self.PROBE_AFTER == 0)

    def _draft(self, kind: str, root, logits, stop_ids, max_depth: int, ngrams: NgramHistory) -> _Draft:
        """The tree with the most expected tokens − λ · seconds."""
        # Behind this many nodes none pays that lies below λ times the cheapest way to add more; the
        # margin is for probabilities that are corrected upwards.
        least = np.minimum(0.5, 0.7 * self.rate * self._slopes)
        children = mixed_children(logits, ngrams, self._bias, self.num_nodes, float(least.min()))
        deepest = min(max_depth, self._lookup.max_depth)
        tree, found = grow_with_probabilities(root, self.num_nodes, children, stop_ids, deepest, least)
        probabilities = self._reliable[kind].corrected(found[1:])
        expected = np.concatenate([[0.0], np.cumsum(probabilities)])
        best = int(np.argmax(expected - self.rate * self._seconds[: tree.num_nodes]))
        kept, promised = tree.first(best + 1), found[: best + 1]
        return _Draft(kind, logits, kept, promised, float(expected[best]), float(self._seconds[best]))

    def observe(self, draft: _Draft, tokens: Sequence[int]) -> None:
        """Take a draft's outcome: the tokens that its step emitted."""
        fresh = draft.kind == "streams"
        spent = draft.seconds + (self.costs.streams if fresh else 0.0)
        self._tokens = self.RATE_MEMORY * self._tokens + len(tokens)
        self._spent = self.RATE_MEMORY * self._spent + spent
        accepted, node = np.zeros(draft.tree.num_nodes, bool), 0
        drafted, parents = draft.tree.tokens.tolist(), draft.tree.parents.tolist()
        for token in tokens[:-1]:
            # Children stand behind their parent.
            later = range(node + 1, len(parents))
            node = next(c for c in later if parents[c] == node and drafted[c] == token)
            accepted[node] = True
        self._reliable[draft.kind].observe(draft.probabilities[1:], accepted[1:])

    def remember(self, cell: int, tokens: int, seconds: float) -> None:
        """Take what fresh streams brought, the steps that were drafted with their rest included."""
        self._gains.observe(cell, tokens, seconds)


class _Generation:
    """One generation for the drafter: the n-grams so far, the draft that is out, and the streams
    of an earlier step that reach below the text's end: row j − 1 of a position predicts the j-th token
    after the one that it decided, whether the tokens between were drafted right or not."""

    def __init__(self, drafter: AdaptiveDrafter, ngrams: NgramHistory) -> None:
        self.ngrams = ngrams
        self.pending: _Draft | None = None
        self.leftover = NO_LOGITS
        self._fresh: tuple[int, int, float] | None = None  # cell, tokens and seconds since fresh streams
        self._drafter = drafter

    def extend(self, tokens: Sequence[int]) -> None:
        if self.pending is not None:
            self._drafter.observe(self.pending, tokens)
            self._count(self.pending, len(tokens))
            self.leftover = self.pending.logits
            self.pending = None
        self.leftover = self.leftover[len(tokens) :]
        self.ngrams.extend(tokens)

    def _count(self, draft: _Draft, tokens: int) -> None:
        """Add a step to what the latest fresh streams brought, or begin anew."""
        if draft.kind == "leftover" and self._fresh is not None:
            cell, before, seconds = self._fresh
            self._fresh = cell, before + tokens, seconds + draft.seconds
            return
        self.finish()
        self._fresh = (draft.cell, tokens, draft.seconds) if draft.kind == "streams" else None

    def finish(self) -> None:
        """Tell the drafter what the latest fresh streams brought."""
        if self._fresh is not None:
            self._drafter.remember(*self._fresh)
        self._fresh = None
