"""Activations (MIL: activation). All shapes are kept."""

import numpy as np

from ..errors import ExecutorError
from ..registry import op
from .elementwise import erf


def _sigmoid(x):
    # exp of -|x| cannot overflow, so both tails keep their precision.
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, np.float32(1), e) / (np.float32(1) + e)


def _per_channel(parameter, x):
    """(C,) -> (C, 1, ...) so that it broadcasts along axis 1 of x (n, C, ...)."""
    return parameter.reshape((-1,) + (1,) * (x.ndim - 2))


@op("relu")
def relu(call, x):
    """MIL relu: max(x, 0)."""
    return np.maximum(x, np.float32(0))


@op("relu6")
def relu6(call, x):
    """MIL relu6: min(max(x, 0), 6)."""
    return np.minimum(np.maximum(x, np.float32(0)), np.float32(6))


@op("leaky_relu")
def leaky_relu(call, x, alpha):
    """MIL leaky_relu: x where x >= 0, else alpha·x."""
    return np.where(x >= 0, x, alpha * x)


@op("prelu")
def prelu(call, x, alpha):
    """MIL prelu: x where x > 0, else alpha_c·x; x (n, C, ...), alpha (C,)."""
    return np.where(x > 0, x, _per_channel(alpha, x) * x)


@op("elu")
def elu(call, x, alpha):
    """MIL elu: x where x > 0, else alpha·(e^x − 1)."""
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, np.float32(0))))


@op("clamped_relu")
def clamped_relu(call, x, alpha, beta):
    """MIL clamped_relu: min(beta, x) where x >= 0, else min(beta, alpha·x)."""
    return np.minimum(beta, np.where(x >= 0, x, alpha * x))


@op("thresholded_relu")
def thresholded_relu(call, x, alpha):
    """MIL thresholded_relu: x where x >= alpha, else 0."""
    return np.where(x >= alpha, x, np.float32(0))


@op("linear_activation")
def linear_activation(call, x, alpha, beta):
    """MIL linear_activation: alpha·x + beta."""
    return alpha * x + beta


@op("scaled_tanh")
def scaled_tanh(call, x, alpha, beta):
    """MIL scaled_tanh: alpha·tanh(beta·x)."""
    return alpha * np.tanh(beta * x)


@op("sigmoid")
def sigmoid(call, x):
    """MIL sigmoid."""
    return _sigmoid(x)


@op("sigmoid_hard")
def sigmoid_hard(call, x, alpha, beta):
    """MIL sigmoid_hard: min(max(alpha·x + beta, 0), 1)."""
    return np.clip(alpha * x + beta, np.float32(0), np.float32(1))


@op("silu")
def silu(call, x):
    """MIL silu: x·sigmoid(x)."""
    return x * _sigmoid(x)


@op("softplus")
def softplus(call, x):
    """MIL softplus: ln(1 + e^x)."""
    return np.logaddexp(x, np.float32(0))


@op("softplus_parametric")
def softplus_parametric(call, x, alpha, beta):
    """MIL softplus_parametric: alpha_c·ln(1 + e^(beta_c·x)); x (n, C, ...)."""
    return _per_channel(alpha, x) * np.logaddexp(_per_channel(beta, x) * x, np.float32(0))


@op("softsign")
def softsign(call, x):
    """MIL softsign: x / (1 + |x|)."""
    return x / (np.float32(1) + np.abs(x))


def _gelu_exact(x):
    return np.float32(0.5) * x * (np.float32(1) + erf(None, x * np.float32(np.sqrt(0.5))))


def _gelu_tanh(x):
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (np.float32(1) + np.tanh(inner))


def _gelu_sigmoid(x):
    return x * _sigmoid(np.float32(1.702) * x)


_GELU = {
    "EXACT": _gelu_exact,
    "TANH_APPROXIMATION": _gelu_tanh,
    "SIGMOID_APPROXIMATION": _gelu_sigmoid,
}


@op("gelu")
def gelu(call, x, mode="EXACT"):
    """MIL gelu in its three modes."""
    if mode not in _GELU:
        raise ExecutorError(f"unknown gelu mode '{mode}'")
    return _GELU[mode](x)


@op("softmax")
def softmax(call, x, axis=-1):
    """MIL softmax along `axis`; the maximum is subtracted first."""
    axis = int(axis)
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    e /= e.sum(axis=axis, keepdims=True)
    return e
