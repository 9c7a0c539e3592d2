"""Texts that repeat themselves: a small model's loops, which prompt lookup predicts trivially."""

from __future__ import annotations

from collections.abc import Sequence

REPEATED = 8
"""A run of so many tokens that occurs twice makes a text repeat itself."""


def repeats(ids: Sequence[int], length: int = REPEATED) -> bool:
    """Whether a run of `length` tokens occurs twice in a text."""
    runs = [tuple(ids[i : i + length]) for i in range(len(ids) - length + 1)]
    return len(set(runs)) < len(runs)
