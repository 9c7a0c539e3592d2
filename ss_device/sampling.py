"""Choosing tokens by sampling: the target distribution of one node, and noise keyed by seed and position.

Sampling draws x from the target distribution at the node and follows the child equal to x
(docs/method.md, Choosing tokens), which is exact for any deterministic draft tree. With keyed noise the
draw at a position depends on (seed, position, logits) alone, so speculation does not change the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ss_device.errors import UserError

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Sampling:
    """How the target distribution is made from logits, filters in the order of the fields.

    temperature > 0 divides the logits; top_k keeps the k largest (0: all); top_p keeps the smallest set
    of largest probabilities that reaches p (1: all); min_p keeps p ≥ min_p · max p (0: all). Each
    filter works on the probabilities renormalised after the one before. seed: of the keyed noise.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _expect(
            self.temperature > 0, f"temperature {self.temperature} must be above 0 (greedy: no sampling)"
        )
        _expect(self.top_k >= 0, f"top-k {self.top_k} must not be negative")
        _expect(0 < self.top_p <= 1, f"top-p {self.top_p} must lie in (0, 1]")
        _expect(0 <= self.min_p <= 1, f"min-p {self.min_p} must lie in [0, 1]")
        _expect(0 <= self.seed <= _MASK, f"seed {self.seed} must lie in 0 … 2^64 − 1")

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Target distribution, float64 [V], of logits [V]. Ties at a filter's edge go to the lower id."""
        scaled = logits.astype(np.float64) / self.temperature
        probs = np.exp(scaled - scaled.max())
        probs /= probs.sum()
        if 0 < self.top_k < len(probs):
            order = np.argsort(-probs, kind="stable")
            probs[order[self.top_k :]] = 0.0
            probs /= probs.sum()
        if self.top_p < 1:
            order = np.argsort(-probs, kind="stable")
            before = np.cumsum(probs[order]) - probs[order]
            probs[order[before >= self.top_p]] = 0.0
            probs /= probs.sum()
        if self.min_p > 0:
            probs[probs < self.min_p * probs.max()] = 0.0
            probs /= probs.sum()
        return probs

    def choose(self, logits: np.ndarray, position: int) -> int:
        """The token at `position` (0 = the prompt's first token) drawn with the keyed noise."""
        return draw(self.probabilities(logits), keyed_uniform(self.seed, position))


@dataclass(frozen=True)
class TypicalAcceptance:
    """LOSSY: accept drafted tokens that are merely typical (Medusa 2.3.1; docs/method.md, Choosing tokens).

    A drafted token counts as typical when its probability exceeds min(epsilon, delta · exp(−entropy)) of
    the target distribution; the longest path of such tokens is accepted (`ss_device.tree_choice`). The text
    then depends on the drafts and no longer follows that distribution. Medusa's values are epsilon 0.09 and
    delta 0.3, the square root of epsilon, which is what None stands for.
    """

    epsilon: float = 0.09
    delta: float | None = None

    def __post_init__(self) -> None:
        _expect(0 < self.epsilon <= 1, f"typical acceptance: epsilon {self.epsilon} must lie in (0, 1]")
        _expect(
            self.delta is None or 0 < self.delta <= 1,
            f"typical acceptance: delta {self.delta} must lie in (0, 1]",
        )

    def threshold(self, probabilities: np.ndarray) -> float:
        """What a token's probability must exceed, given the target distribution [V]."""
        some = probabilities[probabilities > 0]
        entropy = -float(np.sum(some * np.log(some)))
        delta = math.sqrt(self.epsilon) if self.delta is None else self.delta
        return min(self.epsilon, delta * math.exp(-entropy))


# Changes logits [V] given the text so far, for example a repetition penalty.
LogitsProcessor = Callable[[Sequence[int], np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Sampler:
    """How `decode` chooses a token: processors, then sampling, or argmax (ties: lowest id) without it.

    Exact for any draft: the drafted tokens do not influence the choice, unless `lossy_typical` is set.
    """

    sampling: Sampling | None = None
    processors: tuple[LogitsProcessor, ...] = ()
    lossy_typical: TypicalAcceptance | None = None

    def __post_init__(self) -> None:
        _expect(
            self.lossy_typical is None or self.sampling is not None,
            "lossy typical acceptance needs a temperature above 0",
        )

    def __call__(self, logits: np.ndarray, text: Sequence[int]) -> int:
        """The token after `text` (prompt, output and the node's own path) under logits [V]."""
        logits = self._processed(logits, text)
        if self.sampling is None:
            return int(np.argmax(logits))
        return self.sampling.choose(logits, len(text))

    def typical(self, logits: np.ndarray, text: Sequence[int], drafted: Sequence[int]) -> dict[int, float]:
        """Log-probability of each of the drafted tokens after `text` that `lossy_typical` accepts."""
        if not drafted:
            return {}
        probabilities = self.sampling.probabilities(self._processed(logits, text))
        threshold = self.lossy_typical.threshold(probabilities)
        return {t: math.log(probabilities[t]) for t in drafted if probabilities[t] > threshold}

    def _processed(self, logits: np.ndarray, text: Sequence[int]) -> np.ndarray:
        for processor in self.processors:
            logits = processor(text, logits)
        return logits


def keyed_uniform(seed: int, position: int) -> float:
    """A uniform number in [0, 1) that depends on seed and position alone.

    The upper 53 bits of splitmix64(seed xor splitmix64(position)); Vigna's splitmix64 finaliser.
    """
    return (_splitmix64(seed ^ _splitmix64(position)) >> 11) * 2.0**-53


def draw(probabilities: np.ndarray, uniform: float) -> int:
    """Inverse transform in token id order: the first id whose cumulative sum exceeds uniform · total."""
    cumulative = np.cumsum(probabilities)
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    # Rounding can put the product on the total itself; the last possible token is meant then.
    return min(index, int(np.nonzero(probabilities)[0][-1]))


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)
