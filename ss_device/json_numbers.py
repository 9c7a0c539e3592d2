"""Numbers that JSON cannot represent."""

from __future__ import annotations

import math


def with_nulls(value):
    """`value`, of dicts, lists, tuples, texts and numbers, with None for every NaN and infinity."""
    if isinstance(value, dict):
        return {key: with_nulls(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [with_nulls(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
