"""Bootstrap confidence intervals of means over prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def mean_interval(
    values: Sequence[float], level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean of `values` (one per prompt, resampled with replacement).

    Efron and Tibshirani, An Introduction to the Bootstrap, 13.3. The same seed gives the same interval.
    """
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or not len(array):
        raise ValueError("at least one value is needed")
    rng = np.random.default_rng(seed)
    means = np.concatenate(
        [array[rng.integers(0, len(array), (100, len(array)))].mean(1) for _ in range(-(-resamples // 100))]
    )
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
