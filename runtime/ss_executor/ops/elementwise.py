"""Elementwise operations of one, two and three inputs (MIL: elementwise_unary, _binary, select)."""

import numpy as np

from ..registry import op

_UNARY = {
    "abs": np.abs, "acos": np.arccos, "asin": np.arcsin, "atan": np.arctan, "atanh": np.arctanh,
    "ceil": np.ceil, "cos": np.cos, "cosh": np.cosh, "exp": np.exp, "exp2": np.exp2,
    "floor": np.floor, "logical_not": np.logical_not, "sign": np.sign, "sin": np.sin,
    "sinh": np.sinh, "sqrt": np.sqrt, "square": np.square, "tan": np.tan, "tanh": np.tanh,
    "round": np.rint,
}  # fmt: skip

_BINARY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "maximum": np.maximum,
    "minimum": np.minimum, "pow": np.power, "floor_div": np.floor_divide, "mod": np.mod,
    "real_div": np.true_divide, "equal": np.equal, "not_equal": np.not_equal,
    "greater": np.greater, "greater_equal": np.greater_equal, "less": np.less,
    "less_equal": np.less_equal, "logical_and": np.logical_and, "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
}  # fmt: skip


def _unary(function):
    return lambda call, x: function(x)


def _binary(function):
    return lambda call, x, y: function(x, y)


for _name, _function in _UNARY.items():
    op(_name)(_unary(_function))
for _name, _function in _BINARY.items():
    op(_name)(_binary(_function))

# Rational approximation x·P(x²)/Q(x²) of erf on [-4, 4] (Eigen, XLA); float32 accurate.
_ERF_P = (-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06,
          -5.69250639462346e-05, -7.34990630326855e-04, -2.95459980854025e-03,
          -1.60960333262415e-02)  # fmt: skip
_ERF_Q = (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03,
          -7.37332916720468e-03, -1.42647390514189e-02)  # fmt: skip


def _polynomial(x: np.ndarray, coefficients: tuple[float, ...]) -> np.ndarray:
    """Horner's rule, highest power first; one buffer."""
    result = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result *= x
        result += np.float32(coefficient)
    return result


@op("erf")
def erf(call, x):
    """MIL erf: the Gauss error function. x, result: any shape."""
    clamped = np.clip(np.asarray(x, np.float32), np.float32(-4), np.float32(4))
    squared = np.atleast_1d(clamped * clamped)
    ratio = _polynomial(squared, _ERF_P) / _polynomial(squared, _ERF_Q)
    return clamped * ratio.reshape(clamped.shape)


@op("log")
def log(call, x, epsilon=0.0):
    """MIL log: ln(x + epsilon). The default epsilon of 1e-45 is 0 once stored as fp16."""
    return np.log(x + epsilon)


@op("rsqrt")
def rsqrt(call, x, epsilon=1e-12):
    """MIL rsqrt: 1 / sqrt(x + epsilon). An fp16 epsilon of 1e-12 is stored as 0."""
    return np.float32(1) / np.sqrt(x + epsilon)


@op("inverse")
def inverse(call, x, epsilon=1e-4):
    """MIL inverse: 1 / (x + epsilon)."""
    return np.float32(1) / (x + epsilon)


@op("clip")
def clip(call, x, alpha, beta):
    """MIL clip: min(max(x, alpha), beta)."""
    return np.minimum(np.maximum(x, alpha), beta)


@op("threshold")
def threshold(call, x, alpha):
    """MIL threshold: max(x, alpha)."""
    return np.maximum(x, alpha)


@op("cast", view=True, exact=False)
def cast(call, x, dtype=None):
    """MIL cast to the declared result type: floats to integers towards zero, to bool as != 0."""
    target = call.outputs[0].dtype
    if target == "bool":
        return x != 0
    if x.dtype.kind == "f" and "int" in target:
        # Through int64, so that values an 8-bit type cannot hold wrap instead of being undefined.
        return np.trunc(x).astype(np.int64)
    return x


@op("select", exact=True)
def select(call, cond, a, b):
    """MIL select: a where cond is true, else b, with broadcasting."""
    return np.where(cond, a, b)
