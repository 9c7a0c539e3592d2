"""Sorting (MIL: topk, argsort). Ties go to the lower index."""

import numpy as np

from ..registry import op


def _sorted_indices(x: np.ndarray, ascending: bool) -> np.ndarray:
    """Indices that sort the last axis, ties by index."""
    if ascending:
        return np.argsort(x, axis=-1, kind="stable")
    # A stable ascending sort of the mirrored row, mirrored back, puts equal values in index order.
    return x.shape[-1] - 1 - np.argsort(x[..., ::-1], axis=-1, kind="stable")[..., ::-1]


def _top_of_row(row: np.ndarray, k: int, ascending: bool) -> np.ndarray:
    """Indices of the best k of a long row: full order only among those at least as good."""
    if ascending:
        candidates = np.flatnonzero(row <= np.partition(row, k - 1)[k - 1])
    else:
        candidates = np.flatnonzero(row >= np.partition(row, row.size - k)[row.size - k])
    if candidates.size < k:  # not-a-number values compare with nothing
        return _sorted_indices(row, ascending)[:k]
    return candidates[_sorted_indices(row[candidates], ascending)][:k]


@op("topk")
def topk(
    call, x, k=1, axis=-1, ascending=False, sort=True, return_indices=True,
    output_indices_dtype=None,
):  # fmt: skip
    """MIL topk along `axis` -> values, indices (only values if return_indices is false).

    k = -1 takes all. Unsorted results may come in any order; they come sorted here.
    """
    axis, ascending = int(axis), bool(ascending)
    rows = np.moveaxis(x, axis, -1)
    size = rows.shape[-1]
    k = size if int(k) == -1 else int(k)
    if size > 16 * k > 0:
        flat = rows.reshape(-1, size)
        indices = np.stack([_top_of_row(row, k, ascending) for row in flat])
        indices = indices.reshape(rows.shape[:-1] + (k,))
    else:
        indices = _sorted_indices(rows, ascending)[..., :k]
    values = np.moveaxis(np.take_along_axis(rows, indices, -1), -1, axis)
    return (values, np.moveaxis(indices, -1, axis)) if bool(return_indices) else values


@op("argsort")
def argsort(call, x, axis=-1, ascending=False):
    """MIL argsort along `axis`."""
    axis = int(axis)
    return np.moveaxis(_sorted_indices(np.moveaxis(x, axis, -1), bool(ascending)), -1, axis)
