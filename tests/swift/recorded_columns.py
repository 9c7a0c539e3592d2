"""What the recordings share: rows of numbers in one file, and logits that a formula makes from a key.

Most logits are not stored: they come from a formula of a 64-bit key that is exact in float32 on both sides
(`hash_logits`, and `hashLogits` in Swift). Those of a small random model are stored in half precision.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ss_device.sampling import Sampling
from ss_device.tree import BigramBias

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "apps/swift/Tests"
RESOURCES = TESTS / "SpeculativeStreamingTests/Resources"
INPUT_RESOURCES = TESTS / "Support/TinyBundles/Resources"
SHAPES = ("best-first", "chain", "k-ary")
KINDS = ("smooth", "ties")


def splitmix64(values: np.ndarray) -> np.ndarray:
    """Vigna's finaliser on uint64 arrays."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def hash_logits(key: int, rows: int, vocab: int, kind: str = "smooth") -> np.ndarray:
    """float32 [rows, vocab] from a key: 14·u⁴ of 24-bit uniforms, or whole numbers 0 … 7 with many ties."""
    mixed = splitmix64(np.uint64(key) ^ splitmix64(np.arange(rows * vocab, dtype=np.uint64)))
    if kind == "ties":
        return (mixed >> np.uint64(61)).astype(np.float32).reshape(rows, vocab)
    u = (mixed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    u = u * u
    return (u * u * np.float32(14)).reshape(rows, vocab)


def hash_bias(key: int, vocab: int, rank: int) -> BigramBias | None:
    """u, v [vocab, rank] in -1 … 1 from a key; None for rank 0."""
    if not rank:
        return None
    factors = []
    for offset in (1, 2):
        mixed = splitmix64(np.uint64(key + offset) ^ splitmix64(np.arange(vocab * rank, dtype=np.uint64)))
        u = (mixed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
        factors.append(u.reshape(vocab, rank))
    return BigramBias(*factors)


class Columns:
    """Arrays that grow row by row, with how many numbers every row added."""

    def __init__(self) -> None:
        self._parts: dict[str, list[np.ndarray]] = {}

    def add(self, dtype=np.int32, **values) -> None:
        for name, value in values.items():
            self._parts.setdefault(name, []).append(np.atleast_1d(np.asarray(value)).ravel().astype(dtype))

    def arrays(self) -> dict[str, np.ndarray]:
        """name → all numbers; name.count → how many per row."""
        joined = {name: np.concatenate(parts) for name, parts in self._parts.items()}
        counts = {
            f"{n}.count": np.array([len(p) for p in parts], np.int32) for n, parts in self._parts.items()
        }
        return joined | counts


def random_sampling(rng: np.random.Generator) -> Sampling:
    return Sampling(
        temperature=float(rng.choice([0.3, 0.7, 1.0, 1.7])),
        top_k=int(rng.choice([0, 1, 5, 20])),
        top_p=float(rng.choice([1.0, 0.9, 0.5])),
        min_p=float(rng.choice([0.0, 0.05, 0.3])),
        seed=int(rng.integers(0, 2**62)),
    )


def add_sampling(columns: Columns, sampling: Sampling | None) -> None:
    """Settings of the sampler; temperature 0 stands for greedy."""
    s = sampling or Sampling()
    columns.add(np.int64, seed=s.seed)
    columns.add(np.float64, settings=[s.temperature if sampling else 0.0, s.top_p, s.min_p])
    columns.add(top_k=s.top_k)
