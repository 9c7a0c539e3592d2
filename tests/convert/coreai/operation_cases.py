"""Uses of every operation with what each runtime should give, as formulas in numpy.

One `Expected` for both runtimes, or two where they differ and both may. Formulas in float32 say where a
runtime rounds; those in float64, rounded once, come with the units in the last place that it may be off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from ss_convert.graph.attention import attend
from ss_convert.graph.compression import Palettized, Quantized, Stored, compress
from ss_convert.graph.interface import MASKED
from ss_convert.graph.operations import op
from ss_convert.graph.tree import one_hot
from tests.convert.coreai.both_runtimes import Case, Expected

RNG = np.random.default_rng(17)
INF, NAN = np.inf, np.nan


def half(values) -> np.ndarray:
    """To the nearest fp16, ties to even."""
    return np.asarray(values).astype(np.float16)


def wide(values) -> np.ndarray:
    return np.asarray(values).astype(np.float32)


def exact(values) -> np.ndarray:
    return np.asarray(values).astype(np.float64)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def case(name: str, build: Callable, expected, apple=None, /, **inputs: np.ndarray) -> Case:
    """expected: of both runtimes, or of the executor where there is `apple`; an array: its exact bits."""
    expected, apple = (Expected(e) if isinstance(e, np.ndarray) else e for e in (expected, apple))
    return Case(name, build, inputs, expected, expected if apple is None else apple)


def use(name: str, **options) -> Callable:
    """Builds one operation of the values that it is given."""
    return lambda *values: getattr(op, name)(*values, **options)


def compared(name: str) -> Callable:
    return lambda x, y: op.to_int(getattr(op, name)(x, y))


ALL = np.arange(65536, dtype=np.uint16).view(np.float16)
EDGES = half(
    [0, -0.0, 2**-24, -(2**-24), 3 * 2**-24, 2**-14, 2**-11, 3 * 2**-11, 1 / 3, 1, -1, 1 + 2**-10, 2,
     300, 2048, 2049, 2050, -2050, 16, 65472, 65504, -65504, INF, -INF, NAN]
)  # fmt: skip
# Every pair of the edges, and random bits.
X, Y = np.concatenate(
    [
        np.stack(np.meshgrid(EDGES, EDGES), axis=-1).reshape(-1, 2),
        RNG.integers(0, 65536, (4000, 2), np.uint16).view(np.float16),
    ]
).T.copy()
WHOLE = ints(0, 1, -1, 2, 3, 2047, 2048, 2049, -2049, 65503, 65519, 65520, -65520, 2**31 - 1, -(2**31))
OTHER = ints(5, -7, 2**31 - 1, -(2**31), 3, 0, 8, 9, 3, 1, -1, 2, 70000, 2, -1)


def arithmetic() -> Iterator[Case]:
    """One rounding to fp16, subnormals kept; comparisons by IEEE 754, which a NaN denies."""
    x, y = wide(X), wide(Y)
    rounded = {"add": x + y, "sub": x - y, "mul": x * y, "real_div": x / y}
    for name, value in rounded.items():
        yield case(name, use(name), half(value), x=X, y=Y)
    # Of two zeros either may come out: Core AI's documentation leaves it open, and numpy does.
    unordered = np.isnan(X) | np.isnan(Y)
    for name, chosen in {"minimum": np.where(Y < X, Y, X), "maximum": np.where(Y > X, Y, X)}.items():
        expected = Expected(np.where(unordered, half(NAN), chosen), zero_signs=False)
        yield case(name, use(name), expected, x=X, y=Y)
    answers = {"equal": X == Y, "greater": X > Y, "greater_equal": X >= Y, "less": X < Y}
    for name, value in answers.items():
        yield case(name, compared(name), value.astype(np.int32), x=X, y=Y)
    columns = wide(EDGES)[:, None]
    yield case(
        "broadcast",
        lambda x: op.add(op.expand_dims(x, axes=[1]), op.expand_dims(x, axes=[0])),
        half(columns + wide(EDGES)), x=EDGES,
    )  # fmt: skip


def constants() -> Iterator[Case]:
    """Constants keep their bits; in a row, Core AI's authoring combines them before anything runs."""
    third = np.float16(1 / 3)
    yield case("constant_left", lambda x: op.sub(third, x), half(wide(third) - wide(X)), x=X)
    zeros, minus = half(np.zeros(200)), half(np.full(200, -0.0))
    odd = np.resize(EDGES, 200)
    yield case(
        "constant_bits",
        lambda x: op.concat([zeros, x, minus, op.constant(odd, "odd"), minus], axis=0),
        np.concatenate([zeros, EDGES, minus, odd, minus]), x=EDGES,
    )  # fmt: skip
    # Without constants every operation rounds.
    rows, product = wide(Y), half(wide(X) * wide(Y))
    yield case(
        "rounded_between",
        lambda x, y: op.sub(op.add(op.mul(x, y), y), y),
        half(wide(half(wide(product) + rows)) - rows), x=X, y=Y,
    )  # fmt: skip
    summed = half(wide(half(wide(ALL) + 2048)) - 2048)
    yield case("constants_added", lambda x: op.sub(op.add(x, np.float16(2048)), np.float16(2048)),
               summed, half(wide(ALL) + 0), x=ALL)  # fmt: skip
    scaled = half(wide(half(wide(ALL) * 6e4)) * 6e4)
    yield case("constants_multiplied", lambda x: op.mul(op.mul(x, np.float16(6e4)), np.float16(6e4)),
               scaled, half(wide(ALL) * INF), x=ALL)  # fmt: skip


def of_every_value() -> Iterator[Case]:
    """Functions of one value, of all 65,536."""
    x = exact(ALL)
    normal = 0.5 * np.array([math.erfc(-value * math.sqrt(0.5)) for value in x])
    inner = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    logistic = {
        name: np.exp(np.minimum(z, 0)) / (1 + np.exp(-np.abs(z)))
        for name, z in (("x", x), ("inner", inner))
    }
    functions = {"exp": np.exp(x), "log": np.log(x), "tanh": np.tanh(x), "silu": x * logistic["x"]}
    for name, value in functions.items():
        yield case(name, use(name), Expected(half(value), ulps=1), x=ALL)
    # What fp16 leaves of 1 + erf and 1 + tanh: Apple's runtime rounds them.
    for mode, value in {"EXACT": x * normal, "TANH_APPROXIMATION": x * logistic["inner"]}.items():
        step = np.where(np.isfinite(x), np.abs(x), 0) * 2.0**-11
        executor, apple = (Expected(half(value), slack=k * step + 2.0**-24) for k in (1, 3))
        yield case(f"gelu_{mode.lower()}", lambda x, mode=mode: op.gelu(x, mode), executor, apple, x=ALL)
    positive = np.where(ALL > 0, ALL, np.where(np.isnan(ALL), ALL, half(0)))
    yield case("relu", use("relu"), Expected(positive, zero_signs=False), x=ALL)
    yield case("identity", use("identity"), ALL, x=ALL)
    # A NaN or an infinity as an integer is left open by both documentations.
    finite = ALL[np.isfinite(ALL)]
    yield case("to_int", use("to_int"), np.trunc(exact(finite)).astype(np.int32), x=finite)
    yield case("bool_to_float", lambda x: op.to_float(op.greater(x, np.float16(0))), half(ALL > 0), x=ALL)


def integers() -> Iterator[Case]:
    """int32 wraps; as fp16 it is rounded to even, beyond 65,519 it is infinite."""
    x, y = WHOLE, OTHER
    values = {
        "add": x + y,
        "sub": x - y,
        "mul": x * y,
        "minimum": np.minimum(x, y),
        "maximum": np.maximum(x, y),
    }
    for name, value in values.items():
        yield case(f"integers_{name}", use(name), value, x=x, y=y)
    answers = {"equal": x == y, "greater": x > y, "greater_equal": x >= y, "less": x < y}
    for name, value in answers.items():
        yield case(f"integers_{name}", compared(name), value.astype(np.int32), x=x, y=y)
    yield case("identity_of_integers", use("identity"), x, x=x)
    yield case("int_to_float", use("to_float"), half(exact(x)), x=x)
    indices = ints(0, 6, 3, -1, 7, -(2**31), 2**31 - 1)
    yield case("one_hot", lambda x: one_hot(x, 7), half(indices[:, None] == np.arange(7)), x=indices)


TABLE = np.array(
    [
        [1 + 2**-11, 1 + 3 * 2**-11, 65519.99, 65520],
        [1 + 2**-11 + 2**-20, 2**-25, 2**-25 * 1.001, 3 * 2**-25],
        [-(2**-25), -0.0, 1e9, -1e9],
        [0.1, -0.2, np.pi, 1e-30],
    ],
    np.float32,
)


def lookups() -> Iterator[Case]:
    """Rows of a float32 table, as the rotary positions are read; slices of a value along every axis."""
    rows = ints(0, 3, 1, 2, 3, 0)
    found = TABLE[rows]
    yield case(
        "float32_rows", lambda r: op.to_float(op.gather(TABLE, indices=r, axis=0)), half(found), r=rows
    )
    scale = np.float32(1 / 3)
    yield case("float32_scaled", lambda r: op.to_float(op.mul(op.gather(TABLE, indices=r, axis=0), scale)),
               half(found * scale), r=rows)  # fmt: skip
    x = RNG.normal(size=(2, 3, 4)).astype(np.float16)
    x[0, 0, 0], x[1, 2, 3] = -0.0, NAN
    for axis, indices in enumerate((ints(1, 0, 1), ints(2, 0), rows)):
        yield case(f"gather_{axis}", lambda x, r, axis=axis: op.gather(x, indices=r, axis=axis),
                   np.take(x, indices, axis), x=x, r=indices)  # fmt: skip


def shapes() -> Iterator[Case]:
    """The same bits in other places."""
    x = EDGES[:24].reshape(2, 3, 4)
    builds = {
        "transpose_201": (lambda x: op.transpose(x, perm=[2, 0, 1]), x.transpose(2, 0, 1)),
        "transpose_120": (lambda x: op.transpose(x, perm=[1, 2, 0]), x.transpose(1, 2, 0)),
        "transpose_021": (lambda x: op.transpose(x, perm=[0, 2, 1]), x.transpose(0, 2, 1)),
        "reshape": (lambda x: op.reshape(x, shape=[4, -1]), x.reshape(4, 6)),
        "reshape_transposed": (
            lambda x: op.reshape(op.transpose(x, perm=[2, 1, 0]), shape=[3, 8]),
            x.transpose(2, 1, 0).reshape(3, 8),
        ),
        "tile": (lambda x: op.tile(x, reps=[2, 1, 3]), np.tile(x, (2, 1, 3))),
        "expand_dims": (lambda x: op.expand_dims(x, axes=[0, 2]), x[None, :, None]),
        "squeeze": (lambda x: op.squeeze(op.expand_dims(x, axes=[0, 4]), axes=[0, -1]), x),
        "concat": (lambda x: op.concat([x, x, x], axis=-1), np.concatenate([x, x, x], axis=-1)),
        "concat_zeros": (
            lambda x: op.concat([x, half(np.full((2, 1, 4), -0.0))], axis=1),
            np.concatenate([x, half(np.full((2, 1, 4), -0.0))], axis=1),
        ),
        "slice_end": (lambda x: op.slice_by_size(x, begin=[1, 0, 2], size=[1, 3, 2]), x[1:, :, 2:]),
        "slice_all": (lambda x: op.slice_by_size(x, begin=[0, 0, 0], size=[2, 3, 4]), x),
    }  # fmt: skip
    for name, (build, value) in builds.items():
        yield case(name, build, np.ascontiguousarray(value), x=x)
    yield case("concat_integers", lambda x: op.concat([ints(0, 0), x, ints(1)], axis=0),
               np.concatenate([ints(0, 0), WHOLE, ints(1)]), x=WHOLE)  # fmt: skip


WIDTH = 64


def padded(*values: float) -> list[float]:
    return [*values, *[0] * (WIDTH - len(values))]


# Rows that fp16 adds up to something else than float32 does, and special values.
ROWS = half(
    [
        [2048, *[1] * 63], [*[1] * 63, 2048], padded(6e4, 6e4, -6e4, -6e4, 1, 1), padded(6e4, 1, -6e4),
        *([value] * WIDTH for value in (1 / 3, 2**-24, -0.0, -INF, NAN, 65504)),
        padded(1, NAN), padded(NAN, 1), padded(INF, -INF), padded(INF), padded(-INF), [NAN, *range(63)],
        [*range(63), NAN], [-INF, NAN, *[-INF] * 62], [-1, *[-0.0, 0] * 31, -1], [-1, *[0, -0.0] * 31, -1],
        padded(3, 7, 7, 1, 7), [-7, *[-3] * 63],
    ]
)  # fmt: skip
RANDOM = half(RNG.normal(size=(300, 37)) * RNG.choice([0.01, 1, 30], (300, 1)))


def reductions() -> Iterator[Case]:
    """Sums are float32 inside; the largest value is NaN where there is one; the first of equals wins."""
    for axis, kept in ((-1, True), (-1, False), (0, False)):
        name = f"{'last' if axis else 'first'}{'_kept' if kept else ''}"
        largest = Expected(np.max(ROWS, axis=axis, keepdims=kept), zero_signs=False)
        yield case(f"reduce_max_{name}", use("reduce_max", axes=[axis], keep_dims=kept), largest, x=ROWS)
        for what, x, ulps in (("rows", ROWS, 0), ("random", RANDOM, 1)):
            # A sum of -0 is 0: adding starts at 0.
            total = half(exact(x).sum(axis=axis, keepdims=kept) + 0.0)
            build = use("reduce_sum", axes=[axis], keep_dims=kept)
            yield case(f"reduce_sum_{what}_{name}", build, Expected(total, ulps=ulps), x=x)
    # The executor's argmax is a NaN's place, as numpy's; Apple's looks at numbers alone.
    numbers = np.where(np.isnan(ROWS), half(-INF), ROWS)
    for axis, name in ((-1, "last"), (0, "first")):
        executor, apple = (np.argmax(x, axis).astype(np.int32) for x in (ROWS, numbers))
        yield case(f"argmax_{name}", use("reduce_argmax", axis=axis), executor, apple, x=ROWS)
    ordered = ROWS[~np.isnan(ROWS).any(axis=1)]
    best = np.argmax(ordered, axis=-1).astype(np.int32)
    yield case("argmax_of_numbers", use("reduce_argmax", axis=-1), best, x=ordered)


def shares(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """Softmax in float64."""
    powers = np.exp(exact(x) - exact(x).max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)


def softmaxes() -> Iterator[Case]:
    """float32 inside. A row with +inf, or of -inf alone, is NaN (Core AI documents 1 and 0 for +inf)."""
    for axis in (-1, 0):
        expected = Expected(half(shares(RANDOM, axis)), ulps=1)
        yield case(f"softmax_{'last' if axis else 'first'}", use("softmax", axis=axis), expected, x=RANDOM)
    hard = half(
        [
            [MASKED] * 4, [2 * MASKED] * 4, [MASKED, MASKED, 0, MASKED], [MASKED + 8, MASKED, 0, 0],
            [0, -0.0, 0, -0.0], [65504, 65504, -65504, 0], [65504, -65504, -65504, -65504], [-INF, 0, 1, 2],
            [NAN, 0, 0, 0], [INF, 0, 0, 0], [INF, 0, INF, 0], [-INF] * 4,
        ]
    )  # fmt: skip
    yield case("softmax_hard_rows", use("softmax", axis=-1), Expected(half(shares(hard)), ulps=1), x=hard)


def added_in_half(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x [..., n, m] times y [..., m, k], every product and sum rounded to fp16, from the first term on."""
    total = np.zeros(np.matmul(x, y).shape, np.float16)
    for place in range(x.shape[-1]):
        product = half(wide(x[..., :, place, None]) * wide(y[..., None, place, :]))
        total = half(wide(total) + wide(product))
    return total


def products() -> Iterator[Case]:
    """The executor's products are float32 inside, and Apple's convolutions; Apple's matmul adds in fp16."""
    column = half(np.ones((WIDTH, 1)))
    total = half(exact(ROWS).sum(axis=-1, keepdims=True) + 0.0)
    yield case("matmul_of_rows", lambda x: op.matmul(x, column), total, added_in_half(ROWS, column), x=ROWS)
    x, y = half(RNG.normal(size=(2, 5, 90))), half(RNG.normal(size=(2, 90, 3)))
    executor, apple = Expected(half(exact(x) @ exact(y)), ulps=1), added_in_half(x, y)
    yield case("matmul", use("matmul"), executor, apple, x=x, y=y)
    turned = np.ascontiguousarray(y.swapaxes(1, 2))
    yield case("matmul_transposed", use("matmul", transpose_y=True), executor, apple, x=x, y=turned)
    one = np.ascontiguousarray(y[:1])
    executor, apple = Expected(half(exact(x) @ exact(one)), ulps=1), added_in_half(x, one)
    yield case("matmul_broadcast", use("matmul"), executor, apple, x=x, y=one)
    # A selection adds one term that is not zero: exact everywhere, but for the sign of a zero.
    chosen, rows = ints(2, 0, -1, 4), half(RNG.normal(size=(5, 6)) * 1e4)
    picked = np.where(chosen[:, None] < 0, half(0), rows[chosen])
    yield case("selection", lambda i, x: op.matmul(one_hot(i, 5), x), picked, i=chosen, x=rows)
    yield from _projections(x[0], np.ascontiguousarray(y[0].T), half(RNG.normal(size=3)))


def _projections(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> Iterator[Case]:
    """Linear and convolution of x [n, m] by weight [k, m], without and with bias [k]."""
    sums = exact(x) @ exact(weight.T)
    plain, biased = Expected(half(sums), ulps=1), Expected(half(sums + exact(bias)), ulps=1)
    in_half = added_in_half(x, weight.T)
    rounded_twice = half(wide(half(sums)) + wide(bias))
    yield case(
        "linear", lambda x: op.linear(x, weight=op.constant(weight, "linear_w")), plain, in_half, x=x
    )
    yield case("linear_bias", lambda x: op.linear(x, weight=op.constant(weight, "linear_b"), bias=bias),
               biased, half(wide(in_half) + wide(bias)), x=x)  # fmt: skip

    def as_convolution(name: str, x, with_bias):
        lying = op.expand_dims(op.transpose(x, perm=[1, 0]), axes=[0, 2])
        out = op.conv(lying, weight=op.constant(weight[:, :, None, None], name), bias=with_bias)
        return op.transpose(op.squeeze(out, axes=[0, 2]), perm=[1, 0])

    yield case("conv", lambda x: as_convolution("conv_w", x, None), plain, x=x)
    # Core ML's convolution adds its bias before it rounds, Core AI's has none: one operation more.
    yield case("conv_bias", lambda x: as_convolution("conv_b", x, bias), biased,
               Expected(rounded_twice, ulps=1), x=x)  # fmt: skip
    rows = ROWS[:, :, None]
    ones = half(np.ones((1, WIDTH, 1, 1)))
    yield case(
        "conv_of_rows",
        lambda x: op.squeeze(op.conv(op.expand_dims(op.transpose(x, perm=[1, 0]), axes=[0, 2]),
                                     weight=op.constant(ones, "conv_ones")), axes=[0, 1, 2]),
        half(exact(rows).sum(axis=(1, 2)) + 0.0), x=ROWS,
    )  # fmt: skip


NORMED = half(
    [
        *np.concatenate([RNG.normal(size=(8, 24)) * size for size in (1e-7, 1e-4, 0.01, 1, 100, 1e4)]),
        *[np.full(24, value) for value in (0, -0.0, 6e4, -6e4, 65504, 1e-4, 2**-24)],
        [65504, -65504, *[0] * 22], [6e4, *[-6e4] * 23], [2**-24, *[0] * 23], [NAN, *[0] * 23],
        [INF, *[0] * 23],
    ]
)  # fmt: skip
GAIN, SHIFT = half(1 + RNG.normal(size=24) / 10), half(RNG.normal(size=24))


def mean(x: np.ndarray) -> np.ndarray:
    """Along the last axis, which stays; float32, added from the first on."""
    total = np.zeros((*x.shape[:-1], 1), np.float32)
    for place in range(x.shape[-1]):
        total += wide(x[..., place, None])
    return total / np.float32(x.shape[-1])


def normed(x: np.ndarray, epsilon: float) -> np.ndarray:
    """Core AI's dialect in float32, rounded at the end."""
    return half(wide(x) * (np.float32(1) / np.sqrt(mean(wide(x) * wide(x)) + np.float32(epsilon))))


def normed_in_half(x: np.ndarray, epsilon: float) -> np.ndarray:
    """Core AI's dialect with `half_only`: every operation in fp16."""
    largest = np.maximum(np.abs(x).max(axis=-1, keepdims=True), half(2**-14))
    scaled = half(wide(x) / wide(largest))
    squares = half(mean(half(wide(scaled) * wide(scaled))))
    root = half(wide(half(epsilon**0.5)) / wide(largest))
    rest = half(wide(root) * wide(root))
    inverse = half(np.float32(1) / np.sqrt(wide(half(wide(squares) + wide(rest)))))
    return half(wide(scaled) * wide(inverse))


def times(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return half(wide(x) * wide(y))


def scaled_once(x: np.ndarray, epsilon: float) -> np.ndarray:
    """The executor's norm of centred values, in float64: its ε is an fp16 number."""
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + exact(half(epsilon))) * exact(GAIN)


def norms(half_only: bool = False) -> Iterator[Case]:
    """The executor computes in float32 and rounds once. Core AI's norms are several operations: the normed
    values are rounded, then times the gain, then plus the shift."""
    over_rms = normed_in_half if half_only else normed
    # A LayerNorm of [x, -x]: an infinity makes its mean NaN.
    paired = exact(NORMED) - (exact(NORMED) - exact(NORMED)).sum(axis=-1, keepdims=True)
    for axis, epsilon in ((-1, 1e-5), (1, 1e-5), (-1, 1e-6), (1, 1e-8)):
        name = f"{epsilon:.0e}_{'rows' if axis < 0 else 'conv'}".replace("-", "_")
        executor = Expected(half(scaled_once(paired, epsilon)), ulps=1)
        apple = times(over_rms(NORMED, epsilon), GAIN)
        build = partial(_rms_norm, name, axis, epsilon)
        yield case(f"rms_norm_{name}", build, executor, apple, x=NORMED)
    middle = half(mean(NORMED)) if half_only else mean(NORMED)
    centred = half(wide(NORMED) - wide(middle)) if half_only else wide(NORMED) - middle
    deviations = exact(NORMED) - exact(NORMED).mean(axis=-1, keepdims=True)
    scaled, apple = scaled_once(deviations, 1e-5), times(over_rms(centred, 1e-5), GAIN)
    for axis, place in ((-1, "rows"), (1, "conv")):
        plain, shifted = (Expected(half(e), ulps=1) for e in (scaled, scaled + exact(SHIFT)))
        yield case(f"layer_norm_{place}", partial(_layer_norm, axis, None), plain, apple, x=NORMED)
        apples = half(wide(apple) + wide(SHIFT))
        build = partial(_layer_norm, axis, SHIFT)
        yield case(f"layer_norm_shifted_{place}", build, shifted, apples, x=NORMED)


def _along(axis: int, norm: Callable, x):
    """A norm of x [n, w] along its last axis, or along axis 1 of [1, w, 1, n]."""
    if axis == -1:
        return norm(x)
    lying = norm(op.expand_dims(op.transpose(x, perm=[1, 0]), axes=[0, 2]))
    return op.transpose(op.squeeze(lying, axes=[0, 2]), perm=[1, 0])


def _rms_norm(name: str, axis: int, epsilon: float, x):
    gain = op.constant(op.rms_gain(GAIN), f"rms_gain_{name}")
    return _along(axis, lambda rows: op.rms_norm(rows, axis, gain, epsilon), x)


def _layer_norm(axis: int, shift: np.ndarray | None, x):
    name = f"{axis % 3}_{'plain' if shift is None else 'shifted'}"
    gain = op.constant(GAIN, f"layer_gain_{name}")
    if shift is not None:
        shift = op.constant(shift, f"layer_shift_{name}")
    return _along(axis, lambda rows: op.layer_norm(rows, axis, gain, shift, 1e-5), x)


def dense(stored: Stored) -> np.ndarray:
    """The compression's own formula (`graph/compression.py`), rounded once."""
    if isinstance(stored, Quantized):
        block = stored.data.shape[1] // stored.scale.shape[1]
        return half(wide(stored.data) * wide(np.repeat(stored.scale, block, axis=1)))
    if isinstance(stored, Palettized):
        group = stored.indices.shape[0] // stored.table.shape[0]
        return stored.table[np.arange(stored.indices.shape[0])[:, None] // group, stored.indices]
    return stored


def weights() -> Iterator[Case]:
    """All formats, of ordinary and extreme numbers, and of counts that fill no last byte; in products."""
    matrix = half(RNG.normal(size=(16, 64)) * 0.3)
    matrix[0], matrix[1], matrix[2] = 0, 2**-24, 6e4 * np.sign(matrix[2])
    forms: dict[str, Stored] = {
        name: compress(matrix, name) for name in ("fp16", "int8", "int4", "lut4", "lut6")
    }
    scale = half([[2**-24], [1e-5], [65504], [0.0], [500]])
    forms["int8_extreme"] = Quantized(RNG.integers(-127, 128, (5, 7)).astype(np.int8), scale, 8)
    forms["int4_extreme"] = Quantized(RNG.integers(-7, 8, (5, 7)).astype(np.int8), scale, 4)
    # A scale of zero comes with data of zero (`compress`); of others the products' signs differ.
    for name in ("int8_extreme", "int4_extreme"):
        forms[name].data[3] = 0
    for bits in (4, 6):
        table = np.stack(
            [half([-INF, -0.0, 0, 2**-24, NAN, INF, 65504]), RNG.normal(size=7).astype(np.float16)]
        )
        table = np.resize(table, (2, 2**bits))
        indices = RNG.integers(0, 2**bits, (6, 7)).astype(np.uint8)
        forms[f"lut{bits}_extreme"] = Palettized(indices, table, bits)
    for name, stored in forms.items():
        value = dense(stored)
        rows = np.arange(len(value), dtype=np.int32)
        for trailing in (0, 2):
            shaped = value.reshape(value.shape + (1,) * trailing)
            yield case(
                f"weight_{name}_{trailing}", partial(_weight_rows, name, stored, trailing), shaped, r=rows
            )
    x = half(RNG.normal(size=(3, 64)))
    for name in ("int8", "int4", "lut4", "lut6"):
        executor = Expected(half(exact(x) @ exact(dense(forms[name])[3:].T)), ulps=1)
        yield case(f"linear_{name}", partial(_linear, name, forms[name]), executor,
                   added_in_half(x, dense(forms[name])[3:].T), x=x)  # fmt: skip


def _weight_rows(name: str, stored: Stored, trailing: int, r):
    return op.gather(op.weight(f"rows_{name}_{trailing}", stored, trailing), indices=r, axis=0)


def _linear(name: str, stored: Stored, x):
    """All rows but the first three, whose numbers are of very different sizes."""
    out = op.linear(x, weight=op.weight(f"product_{name}", stored))
    return op.slice_by_size(out, begin=[0, 3], size=[3, 13])


def attentions() -> Iterator[Case]:
    """Fused attention: one rounding in the executor, which also divides by √d. Core AI's composite has a
    scale of 1 and is run as the operations that it is declared around: the explicit form's, with a mask
    that only says what is seen."""
    queries, keys, values = (half(RNG.normal(size=(2, n, 8))) for n in (6, 9, 9))
    mask = half(np.where(RNG.random((1, 6, 9)) < 0.5, 0, MASKED))
    mask[0, :4, 2] = 0
    # Rows that see all and one key; one masked twice, as outside a window too; two that see nothing, one of
    # them all keys but one even less.
    mask[0, 1], mask[0, 2, 3:], mask[0, 2, :2] = 0, MASKED, MASKED
    mask[0, 3] *= 2
    mask[0, 4], mask[0, 5] = MASKED, 2 * MASKED
    mask[0, 5, 7] = MASKED
    scores = exact(queries) @ exact(keys).swapaxes(1, 2) * 8**-0.5 + exact(mask)
    fused = half(shares(scores) @ exact(values))

    def by_steps(product: Callable, masked: np.ndarray) -> np.ndarray:
        raw = product(queries, keys.swapaxes(1, 2))
        return product(half(shares(half(wide(raw) + wide(masked)))), values)

    given = {"queries": queries, "keys": keys, "values": values, "mask": mask}
    once = half(np.where(mask < 0, MASKED, 0))
    yield case(
        "attention",
        use("attention"),
        Expected(fused, ulps=1, slack=2.0**-11),
        by_steps(added_in_half, once),
        **given,
    )
    explicit = Expected(by_steps(lambda x, y: half(exact(x) @ exact(y)), mask), slack=2.0**-11)
    yield case("attention_explicit", _explicit_attention, explicit, by_steps(added_in_half, mask), **given)


def _explicit_attention(queries, keys, values, mask):
    return attend(queries, keys, values, op.squeeze(mask, axes=[0]))


def all_cases() -> list[Case]:
    groups = (
        arithmetic, constants, of_every_value, integers, lookups, shapes, reductions, softmaxes, products,
        norms, weights, attentions,
    )  # fmt: skip
    with np.errstate(all="ignore"):
        return [entry for group in groups for entry in group()]


def half_only_cases() -> list[Case]:
    with np.errstate(all="ignore"):
        return list(norms(half_only=True))
