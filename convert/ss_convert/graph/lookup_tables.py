"""The values of a lookup table: k-means in one dimension, on sorted values.

A cluster of sorted values is a run of neighbours, so a round of Lloyd's algorithm is a search for k
boundaries and a difference of running sums. General implementations compare every value with every centre.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ROUNDS = 100
# Part of the values' range by which centres may still move when they are taken.
SETTLED = 1e-5
# How often centres are taken elsewhere, and what must be left of the error for it to go on.
MOVES, GAIN = 12, 0.999
# Runs of values whose density is one number.
STRETCHES = 512


def best_values(values: np.ndarray, count: int) -> np.ndarray:
    """`count` ascending fp16 values with a small mean squared distance from `values` [n] to the nearest.

    Lloyd's algorithm ends where small moves do not help; then centres that stand too close are taken to
    where they are missing, as long as that helps.
    """
    ordered = np.sort(values.astype(np.float64))
    clusters = _settled(ordered, first_centres(ordered, count))
    for _ in range(MOVES):
        moved = _settled(ordered, _rearranged(clusters))
        if not moved.errors.sum() < GAIN * clusters.errors.sum():
            break
        clusters = moved
    return clusters.centres.astype(np.float16)


@dataclass(frozen=True)
class _Clusters:
    """Ascending centres [k], how many values are nearest to each, and their summed squared distances."""

    centres: np.ndarray
    members: np.ndarray
    errors: np.ndarray


def _settled(ordered: np.ndarray, centres: np.ndarray) -> _Clusters:
    """Lloyd's algorithm from ascending centres."""
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    squares = np.concatenate([[0.0], np.cumsum(ordered**2)])
    settled = SETTLED * (ordered[-1] - ordered[0])
    for _ in range(ROUNDS):
        edges = np.searchsorted(ordered, (centres[1:] + centres[:-1]) / 2)
        edges = np.concatenate([[0], edges, [len(ordered)]])
        members, total = np.diff(edges), np.diff(sums[edges])
        # A centre that nothing is nearest to stays where it is.
        moved = np.where(members > 0, total / np.maximum(members, 1), centres)
        step, centres = np.abs(moved - centres).max(), moved
        if step <= settled:
            break
    errors = np.diff(squares[edges]) - total**2 / np.maximum(members, 1)
    return _Clusters(centres, members, np.maximum(errors, 0))


def _rearranged(found: _Clusters) -> np.ndarray:
    """Centres after the cheapest joins of neighbours have made room for the most useful divisions.

    Joining two clusters costs n·m/(n+m)·d²; dividing one of even density saves three quarters of its error.
    """
    n, m = found.members[:-1], found.members[1:]
    costs = n * m / np.maximum(n + m, 1) * np.diff(found.centres) ** 2
    joins, busy = [], np.zeros(len(found.centres), bool)
    divided = np.argsort(-found.errors, kind="stable")[: max(1, len(busy) // 8)].tolist()
    for join in np.argsort(costs, kind="stable"):
        if len(joins) == len(divided) or costs[join] >= 0.75 * found.errors[divided[len(joins)]]:
            break
        if not busy[join] and not busy[join + 1] and not {join, join + 1} & set(divided):
            busy[join : join + 2] = True
            joins.append(join)
    divided = divided[: len(joins)]
    spread = np.sqrt(found.errors[divided] / np.maximum(found.members[divided], 1))
    centres = found.centres.copy()
    both = np.maximum(n + m, 1)[joins]
    centres[joins] = (n * found.centres[:-1] + m * found.centres[1:])[joins] / both
    # What the join left over becomes the second half of a divided cluster.
    centres[np.asarray(joins, int) + 1] = found.centres[divided] + 0.87 * spread
    centres[divided] -= 0.87 * spread
    return np.sort(centres)


def first_centres(ordered: np.ndarray, count: int) -> np.ndarray:
    """Where centres lie when they are many: as dense as the cube root of the values' density.

    Panter and Dite (1951): the quantiser of least mean squared error for a smooth density f, here m / (n Δ)
    over neighbours that m values and a distance Δ lie between: ∛f·Δ goes with Δ^(2/3). ordered [n].
    """
    at = np.unique(np.linspace(0, len(ordered) - 1, STRETCHES + 1).astype(np.int64))
    edges = ordered[at]
    share = np.concatenate([[0.0], np.cumsum(np.diff(edges) ** (2 / 3))])
    return np.interp((np.arange(count) + 0.5) / count * share[-1], share, edges)


def nearest(values: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [n]: the place of each value's nearest entry in the ascending table; and the table."""
    wide = table.astype(np.float64)
    places = np.searchsorted((wide[1:] + wide[:-1]) / 2, values.astype(np.float64))
    return places.astype(np.uint8), table
