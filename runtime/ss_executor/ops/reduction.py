"""Reductions (MIL: reduction). axes: None means all; keep_dims keeps them with size 1."""

import numpy as np

from ..registry import op


def _log_sum_exp(x, axis, keepdims):
    top = x.max(axis=axis, keepdims=True)
    top = np.where(np.isfinite(top), top, np.float32(0))
    total = np.log(np.sum(np.exp(x - top), axis=axis, keepdims=True)) + top
    return total if keepdims else total.reshape(np.sum(x, axis=axis).shape)


_REDUCTIONS = {
    "reduce_sum": np.sum,
    "reduce_mean": np.mean,
    "reduce_max": np.max,
    "reduce_min": np.min,
    "reduce_prod": np.prod,
    "reduce_l1_norm": lambda x, axis, keepdims: np.sum(np.abs(x), axis=axis, keepdims=keepdims),
    "reduce_l2_norm": lambda x, axis, keepdims: np.sqrt(np.sum(np.square(x), axis=axis, keepdims=keepdims)),
    "reduce_sum_square": lambda x, axis, keepdims: np.sum(np.square(x), axis=axis, keepdims=keepdims),
    "reduce_log_sum": lambda x, axis, keepdims: np.log(np.sum(x, axis=axis, keepdims=keepdims)),
    "reduce_log_sum_exp": _log_sum_exp,
}


def _reduction(function):
    def reduce(call, x, axes=None, keep_dims=False):
        axis = None if axes is None else tuple(np.atleast_1d(axes).tolist())
        return function(x, axis=axis, keepdims=bool(keep_dims))

    return reduce


for _name, _function in _REDUCTIONS.items():
    op(_name)(_reduction(_function))


@op("reduce_argmax")
def reduce_argmax(call, x, axis=-1, keep_dims=False, output_dtype=None):
    """MIL reduce_argmax; ties go to the lowest index (the documentation leaves them open)."""
    return np.argmax(x, axis=int(axis), keepdims=bool(keep_dims))


@op("reduce_argmin")
def reduce_argmin(call, x, axis=-1, keep_dims=False, output_dtype=None):
    """MIL reduce_argmin; ties go to the lowest index (the documentation leaves them open)."""
    return np.argmin(x, axis=int(axis), keepdims=bool(keep_dims))
