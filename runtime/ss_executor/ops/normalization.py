"""Normalisation (MIL: layer_norm, batch_norm, instance_norm, l2_norm, local_response_norm)."""

import numpy as np

from ..registry import op


def _per_channel(parameter, x):
    """(C,) -> (C, 1, ...) along axis 1 of x (n, C, *D)."""
    return parameter.reshape((-1,) + (1,) * (x.ndim - 2))


def _normalized(x, axes, epsilon):
    centred = x - x.mean(axis=axes, keepdims=True)
    variance = np.square(centred).mean(axis=axes, keepdims=True)
    centred /= np.sqrt(variance + epsilon)
    return centred


def _scaled(x, gamma, beta):
    if gamma is not None:
        x *= gamma
    if beta is not None:
        x += beta
    return x


@op("layer_norm")
def layer_norm(call, x, axes=None, gamma=None, beta=None, epsilon=1e-5):
    """MIL layer_norm over `axes` (default all); gamma, beta have the shape x.shape[axes]."""
    axes = range(x.ndim) if axes is None else np.atleast_1d(axes).tolist()
    axes = tuple(sorted(axis % x.ndim for axis in axes))
    shape = [x.shape[axis] if axis in axes else 1 for axis in range(x.ndim)]
    gamma = None if gamma is None else gamma.reshape(shape)
    beta = None if beta is None else beta.reshape(shape)
    return _scaled(_normalized(x, axes, np.float32(epsilon)), gamma, beta)


@op("batch_norm")
def batch_norm(call, x, mean, variance, gamma=None, beta=None, epsilon=1e-5):
    """MIL batch_norm of x (n, C, *D) with the given statistics (C,)."""
    result = x - _per_channel(mean, x)
    result /= np.sqrt(_per_channel(variance, x) + np.float32(epsilon))
    gamma = None if gamma is None else _per_channel(gamma, x)
    return _scaled(result, gamma, None if beta is None else _per_channel(beta, x))


@op("instance_norm")
def instance_norm(call, x, gamma=None, beta=None, epsilon=1e-5):
    """MIL instance_norm of x (n, C, *D): per image and channel over D."""
    result = _normalized(x, tuple(range(2, x.ndim)), np.float32(epsilon))
    gamma = None if gamma is None else _per_channel(gamma, x)
    return _scaled(result, gamma, None if beta is None else _per_channel(beta, x))


@op("l2_norm")
def l2_norm(call, x, epsilon=1e-6):
    """MIL l2_norm: x / sqrt(sum of squares of the last three axes + epsilon)."""
    total = np.square(x).sum(axis=(-3, -2, -1), keepdims=True)
    return x / np.sqrt(total + np.float32(epsilon))


@op("local_response_norm")
def local_response_norm(call, x, size, alpha=1e-4, beta=0.75, k=1.0):
    """MIL local_response_norm of x (n, C, *D): x / (k + alpha/size · Σ x_j²)^beta.

    The sum runs over `size` neighbouring channels, size // 2 of them before.
    """
    size = int(size)
    around = [(0, 0), (size // 2, (size - 1) // 2)] + [(0, 0)] * (x.ndim - 2)
    squares = np.pad(np.square(x), around)
    total = sum(squares[:, i : i + x.shape[1]] for i in range(size))
    return x / np.power(np.float32(k) + np.float32(alpha) / size * total, np.float32(beta))
