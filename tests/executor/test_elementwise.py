"""Elementwise operations and activations against Python's math module, element by element."""

import math

import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb

from ss_executor.dtypes import round_to_half
from ss_executor.ops.elementwise import erf

from .harness import check_cases, elementwise

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 5)).astype(np.float32) * 2
SMALL = RNG.uniform(-0.9, 0.9, size=(3, 5)).astype(np.float32)
POSITIVE = RNG.uniform(0.1, 3, size=(3, 5)).astype(np.float32)
HALVES = np.array([[-2.5, -1.5, -0.5, 0.5, 1.5], [2.5, 0.4, -0.4, 2.6, -2.6]], np.float32)
I = np.array([[7, -7, 3, -3, 0]], np.int32)  # noqa: E741
J = np.array([[2, 2, -2, -2, 5]], np.int32)


def _unary(name, source, function):
    return (
        lambda v: getattr(mb, name)(x=v[source]),
        elementwise(function, {"x": X, "s": SMALL, "p": POSITIVE, "h": HALVES}[source]),
    )


def test_unary(tmp_path):
    cases = [
        _unary("abs", "x", abs), _unary("acos", "s", math.acos), _unary("asin", "s", math.asin),
        _unary("atan", "x", math.atan), _unary("atanh", "s", math.atanh),
        _unary("ceil", "x", math.ceil), _unary("cos", "x", math.cos),
        _unary("cosh", "x", math.cosh), _unary("erf", "x", math.erf), _unary("exp", "x", math.exp),
        _unary("exp2", "x", lambda a: 2.0**a), _unary("floor", "x", math.floor),
        _unary("round", "h", round), _unary("sign", "h", lambda a: (a > 0) - (a < 0)),
        _unary("sin", "x", math.sin), _unary("sinh", "x", math.sinh),
        _unary("sqrt", "p", math.sqrt), _unary("square", "x", lambda a: a * a),
        _unary("tan", "s", math.tan), _unary("tanh", "x", math.tanh),
        (lambda v: mb.log(x=v["p"], epsilon=0.5), elementwise(lambda a: math.log(a + 0.5),
                                                             POSITIVE)),
        (lambda v: mb.rsqrt(x=v["p"], epsilon=0.5), elementwise(lambda a: (a + 0.5) ** -0.5,
                                                               POSITIVE)),
        (lambda v: mb.inverse(x=v["p"], epsilon=0.5), elementwise(lambda a: 1 / (a + 0.5),
                                                                 POSITIVE)),
        (lambda v: mb.clip(x=v["x"], alpha=-1.0, beta=0.5),
         elementwise(lambda a: min(max(a, -1.0), 0.5), X)),
        (lambda v: mb.threshold(x=v["x"], alpha=0.25), elementwise(lambda a: max(a, 0.25), X)),
    ]  # fmt: skip
    check_cases(tmp_path, {"x": X, "s": SMALL, "p": POSITIVE, "h": HALVES}, cases)


def _binary(name, first, second, function):
    arrays = {"x": X, "s": SMALL, "p": POSITIVE, "i": I, "j": J}
    return (
        lambda v: getattr(mb, name)(x=v[first], y=v[second]),
        elementwise(function, arrays[first], arrays[second]),
    )


def test_binary_with_broadcasting(tmp_path):
    cases = [
        _binary("add", "x", "s", lambda a, b: a + b), _binary("sub", "x", "s", lambda a, b: a - b),
        _binary("mul", "x", "s", lambda a, b: a * b),
        _binary("real_div", "x", "p", lambda a, b: a / b),
        _binary("floor_div", "x", "p", lambda a, b: math.floor(a / b)),
        _binary("mod", "x", "p", lambda a, b: a - math.floor(a / b) * b),
        _binary("maximum", "x", "s", max), _binary("minimum", "x", "s", min),
        _binary("pow", "p", "x", lambda a, b: a**b),
        _binary("add", "i", "j", lambda a, b: a + b), _binary("mul", "i", "j", lambda a, b: a * b),
        _binary("floor_div", "i", "j", lambda a, b: a // b),
        _binary("mod", "i", "j", lambda a, b: a % b),
        _binary("equal", "i", "j", lambda a, b: a == b),
        _binary("not_equal", "i", "j", lambda a, b: a != b),
        _binary("greater", "x", "s", lambda a, b: a > b),
        _binary("greater_equal", "i", "j", lambda a, b: a >= b),
        _binary("less", "x", "s", lambda a, b: a < b),
        _binary("less_equal", "i", "j", lambda a, b: a <= b),
        (lambda v: mb.add(x=v["x"], y=np.float32([[1], [2], [3]])),
         np.array([[X[i, j] + i + 1 for j in range(5)] for i in range(3)])),
    ]  # fmt: skip
    check_cases(tmp_path, {"x": X, "s": SMALL, "p": POSITIVE, "i": I, "j": J}, cases)


def test_logic_select_and_cast(tmp_path):
    a, b = X > 0, SMALL > 0

    def bools(v):
        return mb.greater(x=v["x"], y=0.0), mb.greater(x=v["s"], y=0.0)

    def logical(name):
        return lambda v: getattr(mb, name)(x=bools(v)[0], y=bools(v)[1])

    truncated = [[int(item) for item in row] for row in X.tolist()]
    cases = [
        (logical("logical_and"), elementwise(lambda p, q: p and q, a, b)),
        (logical("logical_or"), elementwise(lambda p, q: p or q, a, b)),
        (logical("logical_xor"), elementwise(lambda p, q: p is not q, a, b)),
        (lambda v: mb.logical_not(x=bools(v)[0]), elementwise(lambda p: not p, a)),
        (lambda v: mb.select(cond=bools(v)[0], a=v["x"], b=v["s"]),
         elementwise(lambda p, q, r: q if p else r, a, X, SMALL)),
        (lambda v: mb.cast(x=v["x"], dtype="int32"), np.array(truncated)),
        (lambda v: mb.cast(x=v["x"], dtype="int16"), np.array(truncated)),
        (lambda v: mb.cast(x=v["i"], dtype="bool"), elementwise(lambda p: p != 0, I)),
        (lambda v: mb.cast(x=v["i"], dtype="uint16"), elementwise(lambda p: p % 65536, I)),
        (lambda v: mb.cast(x=v["x"], dtype="fp16"), X.astype(np.float16)),
        (lambda v: mb.cast(x=v["i"], dtype="fp32"), elementwise(float, I)),
    ]  # fmt: skip
    check_cases(tmp_path, {"x": X, "s": SMALL, "i": I}, cases, tolerance=2e-3)


def _sigmoid(a):
    return 1 / (1 + math.exp(-a))


def test_activations(tmp_path):
    channels = np.float32([0.1, 0.2, 0.3])
    beta = np.float32([0.5, 1.0, 2.0])
    image = X.reshape(1, 3, 1, 5)

    def per_channel(function):
        return np.array([[[[function(c, a) for a in r[0]]] for c, r in enumerate(image[0])]])

    def gelu(mode, function):
        return lambda v: mb.gelu(x=v["x"], mode=mode), elementwise(function, X)

    cases = [
        _unary("relu", "x", lambda a: max(a, 0)), _unary("relu6", "x", lambda a: min(max(a, 0), 6)),
        _unary("sigmoid", "x", _sigmoid), _unary("silu", "x", lambda a: a * _sigmoid(a)),
        _unary("softplus", "x", lambda a: math.log1p(math.exp(a))),
        _unary("softsign", "x", lambda a: a / (1 + abs(a))),
        (lambda v: mb.leaky_relu(x=v["x"], alpha=0.1),
         elementwise(lambda a: a if a >= 0 else 0.1 * a, X)),
        (lambda v: mb.elu(x=v["x"], alpha=0.7),
         elementwise(lambda a: a if a > 0 else 0.7 * (math.exp(a) - 1), X)),
        (lambda v: mb.clamped_relu(x=v["x"], alpha=0.2, beta=1.0),
         elementwise(lambda a: min(1.0, a) if a >= 0 else min(1.0, 0.2 * a), X)),
        (lambda v: mb.thresholded_relu(x=v["x"], alpha=0.5),
         elementwise(lambda a: a if a >= 0.5 else 0.0, X)),
        (lambda v: mb.linear_activation(x=v["x"], alpha=2.0, beta=0.5),
         elementwise(lambda a: 2 * a + 0.5, X)),
        (lambda v: mb.scaled_tanh(x=v["x"], alpha=1.5, beta=0.3),
         elementwise(lambda a: 1.5 * math.tanh(0.3 * a), X)),
        (lambda v: mb.sigmoid_hard(x=v["x"], alpha=0.2, beta=0.5),
         elementwise(lambda a: min(max(0.2 * a + 0.5, 0), 1), X)),
        (lambda v: mb.prelu(x=v["n"], alpha=channels),
         per_channel(lambda c, a: a if a > 0 else channels[c] * a)),
        (lambda v: mb.softplus_parametric(x=v["n"], alpha=channels, beta=beta),
         per_channel(lambda c, a: channels[c] * math.log1p(math.exp(beta[c] * a)))),
        gelu("EXACT", lambda a: 0.5 * a * (1 + math.erf(a / math.sqrt(2)))),
        gelu("TANH_APPROXIMATION", lambda a: 0.5 * a * (
            1 + math.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))),
        gelu("SIGMOID_APPROXIMATION", lambda a: a * _sigmoid(1.702 * a)),
    ]  # fmt: skip
    check_cases(tmp_path, {"x": X, "n": image}, cases)


def test_softmax(tmp_path):
    x = RNG.normal(size=(2, 3, 4)).astype(np.float32) * 5

    def along(axis):
        wanted = np.empty_like(x)
        for place in np.ndindex(x.shape):
            line = [x[tuple(k if d == axis else p for d, p in enumerate(place))]
                    for k in range(x.shape[axis])]  # fmt: skip
            wanted[place] = math.exp(x[place]) / sum(math.exp(a) for a in line)
        return wanted

    cases = [(lambda v, a=a: mb.softmax(x=v["x"], axis=a), along(a % 3)) for a in (0, 1, -1)]
    check_cases(tmp_path, {"x": x}, cases)


def test_erf_is_accurate():
    x = np.linspace(-5, 5, 4001).astype(np.float32)
    np.testing.assert_allclose(erf(None, x), [math.erf(a) for a in x.tolist()], atol=6e-7)


def test_round_to_half_equals_the_conversion():
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = np.unique(halves[np.isfinite(halves)])
    middle = (finite[1:] + finite[:-1]) / 2
    noise = np.random.default_rng(1).integers(0, 2**32, 200_000, dtype=np.uint32)
    up, down = np.nextafter(middle, np.float32(9e9)), np.nextafter(middle, np.float32(-9e9))
    edge = np.float32([65519, 65520, -65520, np.inf, -np.inf, np.nan, -0.0, 1e-45, 2.0**-25])
    x = np.concatenate([halves, middle, up, down, noise.view(np.float32), edge])
    with np.errstate(all="ignore"):
        wanted = x.astype(np.float16).astype(np.float32)
        given = round_to_half(x)
    np.testing.assert_array_equal(given, wanted)
    np.testing.assert_array_equal(np.signbit(given[x == 0]), np.signbit(wanted[x == 0]))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_half_precision_is_rounded_after_every_operation(tmp_path, dtype):
    from .harness import run_graph

    x = np.float16([[1.0, 0.3331, 3.0]])

    def graph(x):
        total = mb.add(x=x, y=np.float16(0.0004))  # below half a step at 1.0
        return [total, mb.mul(x=total, y=np.float16(3.0)), mb.cast(x=total, dtype="fp32")]

    total, product, cast = run_graph(tmp_path, graph, {"x": x}, dtype)
    if dtype == "float16":
        assert total.dtype == np.float16 and total[0, 0] == 1.0
        assert product[0, 1] == np.float16(np.float32(total[0, 1]) * 3)
        assert cast.dtype == np.float32 and cast[0, 0] == 1.0
    else:
        exact = x.astype(np.float64) + float(np.float16(0.0004))
        assert total.dtype == np.float32
        np.testing.assert_allclose(product, exact * 3, rtol=1e-6)
        np.testing.assert_allclose(cast, exact, rtol=1e-6)
