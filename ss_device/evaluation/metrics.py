"""Task metrics on generated text."""

from __future__ import annotations

from collections.abc import Sequence

from ss_device.errors import UserError


def exact_match(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Share of predictions equal to their reference, spaces at the ends aside. In [0, 1]."""
    if len(predictions) != len(references) or not references:
        raise ValueError("as many predictions as references are needed, and at least one")
    hits = sum(p.strip() == r.strip() for p, r in zip(predictions, references, strict=True))
    return hits / len(references)


def metric(name: str):
    """The metric of an application by name (`app.toml`)."""
    known = {"exact_match": exact_match}
    if name not in known:
        raise UserError(f"metric '{name}' is not available (available: {', '.join(known)})")
    return known[name]
