"""Training rows whose prompt is nearly a held-out prompt: exact search by word shingles."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

WORDS = 4
"""Words per shingle."""


def shingles(text: str) -> frozenset[str]:
    """Runs of four words in lower case, punctuation aside; a shorter text is one shingle."""
    words = re.findall(r"\w+", text.lower())
    if len(words) <= WORDS:
        return frozenset([" ".join(words)])
    return frozenset(" ".join(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1))


class HeldOutIndex:
    """Finds whether a text's shingles have a Jaccard similarity of `threshold` or more to a held-out text.

    Prefix filtering (Chaudhuri et al. 2006): sets so similar share one of each other's rarest
    `n - ⌈threshold · n⌉ + 1` shingles, so only those are looked up, and nothing is missed.
    """

    def __init__(self, texts: Iterable[str], threshold: float = 0.8) -> None:
        self.threshold = threshold
        self.sets: list[frozenset[str]] = list({shingles(t) for t in texts})
        self.frequency = Counter(s for each in self.sets for s in each)
        self.places: dict[str, list[int]] = defaultdict(list)
        for index, each in enumerate(self.sets):
            for shingle in self._rarest(each):
                self.places[shingle].append(index)

    def _rarest(self, each: frozenset[str]) -> Sequence[str]:
        count = len(each) - math.ceil(self.threshold * len(each)) + 1
        return sorted(each, key=lambda s: (self.frequency[s], s))[:count]

    def holds(self, text: str) -> bool:
        """Whether a held-out text is so similar to this one."""
        own = shingles(text)
        candidates = {index for shingle in self._rarest(own) for index in self.places.get(shingle, ())}
        return any(self._similar(own, self.sets[index]) for index in candidates)

    def _similar(self, a: frozenset[str], b: frozenset[str]) -> bool:
        common = len(a & b)
        return common >= self.threshold * (len(a) + len(b) - common)
