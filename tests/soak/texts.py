"""Drafted text against plain decoding of the same back end, token by token; what differs is explained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from ss_device.decoding import Drafter, decode
from ss_device.sampling import Sampler, Sampling, keyed_uniform
from ss_device.step_model import StepModel

# Differences of logits that rounding explains, as shares of the largest one: `ss_runtime.validation` allows
# float16 the same. Quantized keys and values may in addition differ by a code.
ROUNDING = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 0.2}
CODE_STEP = {8: 0.05, 4: 0.5}


class Recorder:
    """A sampler that chooses as `sampler` does (None: greedily) and remembers the logits by position."""

    def __init__(self, sampler: Sampler | None) -> None:
        self._sampler = sampler or Sampler()
        self.logits: dict[int, np.ndarray] = {}

    def __call__(self, logits: np.ndarray, text: Sequence[int]) -> int:
        for processor in self._sampler.processors:
            logits = processor(text, logits)
        self.logits[len(text)] = np.array(logits, np.float32)
        bare = Sampler(self._sampler.sampling)
        return bare(logits, text)


@dataclass(frozen=True)
class Mismatch:
    """The first token in which two texts differ.

    gap: largest difference of the logits there, as a share of the largest; distance: greedy: the margin of
    the plain logits between both tokens, as such a share; sampling: of the draw to the nearest edge between
    two tokens in the cumulative distribution. explained: the gap is within rounding.
    """

    case: str
    setting: str
    position: int
    plain: int
    drafted: int
    gap: float
    distance: float
    sampled: bool
    explained: bool

    def line(self) -> str:
        kind = ("draw from the nearest edge" if self.sampled else "margin") + f" {self.distance:.2g}"
        word = "rounding" if self.explained else "NOT EXPLAINED"
        return (
            f"{self.case}: {word}: position {self.position}, token {self.drafted} instead of {self.plain}; "
            f"{kind}, logits differ by {self.gap:.2g} of the largest ({self.setting})"
        )


@dataclass
class Counts:
    """What was compared. refused: requests that did not fit; reused: tokens of prompts."""

    cases: int = 0
    texts: int = 0
    tokens: int = 0
    drafted: int = 0
    calls: int = 0
    reused: int = 0
    refused: int = 0
    reasons: Counter = field(default_factory=Counter)
    mismatches: list[Mismatch] = field(default_factory=list)

    @property
    def unexplained(self) -> list[Mismatch]:
        return [m for m in self.mismatches if not m.explained]

    @property
    def near_ties(self) -> int:
        """Greedy differences that rounding explains."""
        return sum(m.explained and not m.sampled for m in self.mismatches)

    @property
    def near_edges(self) -> int:
        """Sampled ones: a draw within rounding of the edge between two tokens."""
        return sum(m.explained and m.sampled for m in self.mismatches)

    def to_dict(self) -> dict:
        plain = {name: value for name, value in asdict(self).items() if name != "mismatches"}
        return {**plain, "mismatches": [asdict(m) for m in self.mismatches]}


def text_of(
    model: StepModel, drafter, prompt: list[int], count: int, sampler, counts: Counts | None = None
) -> list[int]:
    """The generated tokens, counted where asked."""
    tokens: list[int] = []
    for step in decode(model, drafter, prompt, count, frozenset(), sampler):
        tokens += step.tokens
        if counts is not None:
            counts.calls += step.tree is not None
            counts.drafted += step.num_drafted
    return tokens


def first_difference(one: list[int], other: list[int]) -> int | None:
    """Index of the first token that differs; a text that ends early differs there."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


@dataclass(frozen=True)
class Question:
    """One comparison: who was asked what."""

    case: str
    setting: str
    dtype: str
    kv_bits: int | None
    drafter: Drafter
    prompt: list[int]
    count: int
    sampler: Sampler | None


def explain(question: Question, plain_model, model, texts: tuple[list[int], list[int]]) -> Mismatch:
    """Both texts again with their logits recorded, and what they say of the first difference."""
    at, sampler = first_difference(*texts), question.sampler
    position = len(question.prompt) + at
    expected = _logits_at(position, plain_model, Drafter(1), question)
    found = _logits_at(position, model, question.drafter, question)
    tokens = [text[at] if at < len(text) else -1 for text in texts]
    told = (question.case, question.setting, position, *tokens)
    sampling = sampler.sampling if sampler else None
    if expected is None or found is None or -1 in tokens:
        return Mismatch(*told, np.inf, np.inf, sampling is not None, False)
    scale = float(np.abs(expected).max()) or 1.0
    gap = float(np.abs(expected - found).max()) / scale
    if sampling:
        distance = edge_distance(sampling, expected, position)
    else:
        distance = float(abs(expected[tokens[0]] - expected[tokens[1]])) / scale
    allowed = max(ROUNDING[question.dtype], CODE_STEP.get(question.kv_bits, 0.0))
    explained = gap <= allowed and (sampling is not None or distance <= 2 * gap + 1e-6)
    return Mismatch(*told, gap, distance, sampling is not None, explained)


def _logits_at(position: int, model, drafter: Drafter, question: Question) -> np.ndarray | None:
    """The logits that chose the token at a position, None where the walk did not come by."""
    recorder = Recorder(question.sampler)
    text_of(model, drafter, question.prompt, question.count, recorder)
    return recorder.logits.get(position)


def edge_distance(sampling: Sampling, logits: np.ndarray, position: int) -> float:
    """How far the draw at a position lies from the nearest edge of the cumulative distribution."""
    probabilities = sampling.probabilities(logits)
    edges = np.cumsum(probabilities)[probabilities > 0][:-1]
    drawn = keyed_uniform(sampling.seed, position)
    return float(np.abs(edges - drawn).min()) if edges.size else 1.0
