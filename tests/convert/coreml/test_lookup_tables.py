"""Lookup tables against the optimum, which coremltools' bundled kmeans1d finds by dynamic programming."""

from __future__ import annotations

import numpy as np
import pytest
from coremltools._deps.kmeans1d import cluster

from ss_convert.graph.lookup_tables import best_values, nearest

RNG = np.random.default_rng(3)
VALUES = {
    "normal": RNG.normal(0, 0.05, 1500),
    "heavy tails": RNG.standard_t(2, 1500) * 0.02,
    # As matrices that begin as copies: most values near zero, some near one.
    "two scales": np.concatenate([RNG.normal(0, 0.003, 1400), RNG.normal(1, 0.05, 100)]),
    "one value": np.full(100, 0.25),
    "fewer values than entries": RNG.integers(0, 9, 200) / 8,
}


@pytest.mark.parametrize("count", [16, 64])
@pytest.mark.parametrize("kind", VALUES)
def test_error_is_close_to_the_optimum(kind, count):
    values = VALUES[kind].astype(np.float16)
    table = best_values(values, count)
    assert table.dtype == np.float16 and table.shape == (count,) and np.all(np.diff(table) >= 0)
    indices, _ = nearest(values, table)
    wide = values.astype(np.float64)
    found = np.square(table.astype(np.float64)[indices] - wide).mean()
    best = cluster(wide.tolist(), count)
    optimum = np.square(np.asarray(best.centroids)[np.asarray(best.clusters)] - wide).mean()
    # Entries are rounded to fp16, the optimum's centres are not.
    rounding = np.square(np.abs(wide).max() * 2.0**-11)
    assert found <= 1.1 * optimum + rounding
    distance = np.abs(wide[:, None] - table.astype(np.float64)[None])
    np.testing.assert_array_equal(distance.min(axis=1), distance[np.arange(len(wide)), indices])
