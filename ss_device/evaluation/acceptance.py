"""Tokens per call and per-depth acceptance of an adapter on prompts, measured on the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ss_device.decoding import Drafter, decode
from ss_device.step_model import StepModel
from ss_device.tree import DraftTree


@dataclass
class AcceptanceCounts:
    """Sums over all steps of all prompts.

    tokens: emitted after each prompt's first token, trimmed at the end token; calls: model calls
    after prefill; offered[d], accepted[d]: steps whose tree reached depth d + 1 below an accepted
    parent, and those accepted there; rows: verified nodes.
    """

    prompts: int = 0
    tokens: int = 0
    calls: int = 0
    rows: int = 0
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    per_prompt: list[float] = field(default_factory=list)

    def add(self, tree: DraftTree, path: Sequence[int], emitted: int, rows: int) -> None:
        """Count one call after prefill: its tree, accepted path, emitted tokens and verified rows."""
        self.calls += 1
        self.tokens += emitted
        self.rows += rows
        last = path[-1]
        deepest = int(tree.depths[last])
        self._grow(deepest + 1)
        for depth in range(deepest):
            self.offered[depth] += 1
            self.accepted[depth] += 1
        if tree.children(last):
            self.offered[deepest] += 1

    def end_prompt(self, tokens_before: int, calls_before: int) -> None:
        """Close a prompt that began when `tokens` and `calls` stood at the given values."""
        self.prompts += 1
        if calls := self.calls - calls_before:
            self.per_prompt.append((self.tokens - tokens_before) / calls)

    def merge(self, other: AcceptanceCounts) -> None:
        """Add the counts of other prompts."""
        self._grow(len(other.offered))
        for name in ("prompts", "tokens", "calls", "rows"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("offered", "accepted"):
            mine, theirs = getattr(self, name), getattr(other, name)
            mine[: len(theirs)] = [a + b for a, b in zip(mine, theirs, strict=False)]
        self.per_prompt.extend(other.per_prompt)

    def _grow(self, depth: int) -> None:
        missing = depth - len(self.offered)
        self.offered.extend([0] * missing)
        self.accepted.extend([0] * missing)

    def summary(self) -> dict:
        """tokens_per_call with the spread over prompts, per-depth acceptance given the parent's."""
        spread = np.percentile(self.per_prompt, [10, 50, 90]).round(3).tolist() if self.per_prompt else []
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "calls": self.calls,
            "tokens_per_call": round(self.tokens / max(1, self.calls), 4),
            "tokens_per_call_p10_p50_p90": spread,
            "rows_per_call": round(self.rows / max(1, self.calls), 2),
            "acceptance_by_depth": [
                round(a / o, 4) for a, o in zip(self.accepted, self.offered, strict=True) if o
            ],
        }


def measure(
    model: StepModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    stop_ids: frozenset[int],
    report: Callable[[int, int], None] = lambda done, total: None,
    stopped: Callable[[list[int]], int | None] = lambda ids: None,
) -> tuple[AcceptanceCounts, list[list[int]]]:
    """Decode every prompt (token ids); the counts and the generated ids of each, end token included.

    stopped: how many of the generated ids to keep once a stop string is met, None before.
    """
    counts, outputs = AcceptanceCounts(), []
    for prompt in prompts:
        before = (counts.tokens, counts.calls)
        generated: list[int] = []
        for step in decode(model, drafter, prompt, max_tokens, stop_ids):
            end = stopped(generated + step.tokens)
            kept = step.tokens if end is None else step.tokens[: end - len(generated)]
            generated.extend(kept)
            if step.tree is not None:
                counts.add(step.tree, step.path, len(kept), len(step.verified.kept))
            if end is not None:
                break
        counts.end_prompt(*before)
        outputs.append(generated)
        report(counts.prompts, len(prompts))
    return counts, outputs
