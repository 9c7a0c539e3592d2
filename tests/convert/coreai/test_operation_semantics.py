"""Every operation of the graphs on both runtimes, against numpy formulas and against each other.

The executor runs MIL in float16 as saved; Apple's runtime (the CPU one of the wheel coreai-core 1.0.0b3)
runs Core AI. Compared are bits: NaN equals NaN, -0 differs from 0. Both do most operations alike. Where
they do not, the documentation leaves it open; every line is a case of `operation_cases.py` or a test below:

    matmul, linear     executor: sums in float32, rounded once. Apple: every product and every sum rounded
                       to fp16, in order: 2048 + 1 + 1 … stays 2048, 6e4 + 6e4 - 6e4 is infinite
    conv with a bias   executor: added before rounding. Apple: an operation of its own, rounded twice
    gelu               executor: off by |x|·2^-11 at most. Apple: by 3·|x|·2^-11, 1 + erf and 1 + tanh being
                       rounded to fp16
    rms_norm,          executor: float32, rounded once, ε an fp16 number (1e-6 is 1.01e-6, 1e-8 is 0).
    layer_norm         Apple: normed values in float32, rounded, times the gain, rounded, plus the shift,
                       rounded. With `half_only` every operation in fp16: a value further than 65,504 from
                       the mean of its row makes a layer_norm NaN
    rms_norm           of a row with an infinity. Executor: NaN. Apple: 0 beside it; with `half_only` NaN
    attention          executor: rounded once. Apple: the explicit form that the composite is declared
                       around, bit for bit, but a key masked twice is a key masked once
    x + c - d, x·c·d   executor: every operation rounds. Core AI's authoring makes x + (c - d) and x·(c·d)
                       of them; no graph has two constants in a row (`test_constants_in_a_row.py`)
    argmax             of a row with NaN. Executor: the first NaN. Apple: the largest number
    to_int             of NaN and ±inf. Executor: as numpy on that processor. Apple: 0 and the last integers
    gather             at -1. Executor: an error, as beyond the ends. Apple: the last slice
    update_state       behind the end. Executor: an error. Apple: what lies within is written, silently
    minimum, maximum,  of 0 and -0: either zero
    reduce_max, relu
    exp, log, tanh,    float32 inside, 1 ulp from the exact value and from each other
    silu, softmax,
    reduce_sum, conv

No graph has an index out of range or writes behind the end: `ss_device.step_checks` refuses token ids
outside the vocabulary and prompts and trees that reach past the context; rotary tables reach past it by the
streams, the state by a whole chunk or tree; a commit's -1 is a row of zeros of a one-hot matrix, or raised
to 0 in a gather; learned positions end at the table's last row.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("coreai", reason="coreai-core is not installed")

from ss_convert.graph import operations
from ss_convert.graph.interface import STATE
from ss_convert.graph.operations import op
from ss_executor import ExecutorError
from tests.convert.coreai.both_runtimes import (
    BothRuntimes,
    Case,
    Expected,
    function_of,
    graph_function,
    same_bits,
)
from tests.convert.coreai.operation_cases import INF, NAN, all_cases, half, half_only_cases, ints

CASES = all_cases()
HALF_ONLY = half_only_cases()
SLOTS = (2, 1, 6, 3)
LOOKUP = {"x": half(np.arange(12).reshape(3, 4)), "index": ints(0)}
ROWS = half(np.arange(1, 13).reshape(2, 1, 2, 3))
ROWS[0, 0, 0] = [NAN, -0.0, INF]
UPDATE = {"rows": ROWS, "position": ints(0)}
NOT_FINITE = {"x": half([NAN, INF, -INF])}


def _update(values: dict) -> dict:
    """Rows at a run-time position, then at a constant one; what is read before, between and behind."""
    state, position = values[STATE], values["position"]
    before = op.read_state(state)
    begin = op.concat([np.zeros(2, np.int32), position, np.zeros(1, np.int32)], axis=0)
    between = op.update_state(state, before, values["rows"], begin)
    behind = op.update_state(state, between, op.mul(values["rows"], np.float16(2)), ints(0, 0, 2, 0))
    return {f"read_{n}": op.identity(v) for n, v in enumerate((before, between, behind))}


def _write(values: dict) -> dict:
    begin = op.concat([np.zeros(2, np.int32), values["position"], np.zeros(1, np.int32)], axis=0)
    written = op.update_state(values[STATE], op.read_state(values[STATE]), values["rows"], begin)
    return {"read": op.identity(written)}


def _look_up(values: dict) -> dict:
    found = op.gather(values["x"], indices=values["index"], axis=0)
    # A MIL function must use its state.
    return {"found": found, "read": op.identity(op.read_state(values[STATE]))}


def _as_integers(values: dict) -> dict:
    return {"found": op.to_int(values["x"]), "read": op.identity(op.read_state(values[STATE]))}


FUNCTIONS = [
    function_of("cases", CASES)[0],
    graph_function("update", UPDATE, SLOTS, _update),
    graph_function("write", UPDATE, SLOTS, _write),
    graph_function("look_up", LOOKUP, SLOTS, _look_up),
    graph_function("as_integers", NOT_FINITE, SLOTS, _as_integers),
]


@pytest.fixture(scope="module")
def runtimes(tmp_path_factory) -> BothRuntimes:
    return BothRuntimes(FUNCTIONS, tmp_path_factory.mktemp("operations"))


@pytest.fixture(scope="module")
def found(runtimes) -> tuple[dict, dict]:
    """The cases' values by name, of the executor and of Apple's runtime."""
    inputs = function_of("cases", CASES)[1]
    return runtimes.executor("cases", inputs)[0], runtimes.apple("cases", inputs)[0]


@pytest.fixture(scope="module")
def found_in_half(tmp_path_factory) -> tuple[dict, dict]:
    function, inputs = function_of("cases", HALF_ONLY)
    runtimes = BothRuntimes([function], tmp_path_factory.mktemp("half_only"), half_only=True)
    return runtimes.executor("cases", inputs)[0], runtimes.apple("cases", inputs)[0]


def check(values: np.ndarray, expected: Expected) -> None:
    wrong = np.argwhere(expected.misses(values)).tolist()
    shown = [(place, values[tuple(place)], expected.values[tuple(place)]) for place in wrong[:5]]
    assert not wrong, f"{len(wrong)} of {values.size}, first (place, found, expected): {shown}"


def named(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def test_every_operation_has_a_case(tmp_path, monkeypatch):
    used, look_up = set(), operations._Current.__getattr__

    def noted(current, name: str):
        used.add(name)
        return look_up(current, name)

    monkeypatch.setattr(operations._Current, "__getattr__", noted)
    BothRuntimes(FUNCTIONS, tmp_path)
    assert used == {name for name in vars(operations.Operations) if not name.startswith("_")}


@named(CASES)
def test_executor_gives_the_formula(found, case):
    check(found[0][case.name], case.executor)


@named(CASES)
def test_apples_runtime_gives_the_formula(found, case):
    check(found[1][case.name], case.apple)


@named([case for case in CASES if case.executor is case.apple])
def test_runtimes_agree(found, case):
    expected, (executor, apple) = case.executor, (values[case.name] for values in found)
    check(apple, Expected(executor, expected.ulps, expected.slack, expected.zero_signs))


@named([case for case in CASES if case.executor is not case.apple])
def test_difference_is_there(found, case):
    """So that the list above says what is."""
    assert not same_bits(*(values[case.name] for values in found)).all()


@named(HALF_ONLY)
def test_norms_in_half_precision_alone(found_in_half, case):
    check(found_in_half[1][case.name], case.apple)


def test_composite_is_the_explicit_form(found):
    """But for the last row, whose keys are all masked, most of them twice."""
    fused, explicit = found[1]["attention"], found[1]["attention_explicit"]
    assert same_bits(fused, explicit)[:, :5].all() and not same_bits(fused, explicit)[:, 5].all()


def test_update_state_at_the_first_and_at_the_last_position(runtimes):
    start = half(np.arange(36).reshape(SLOTS))
    start[1, 0, 5] = [NAN, -0.0, -INF]
    for run in (runtimes.executor, runtimes.apple):
        state, expected = start, start.copy()
        for position in (0, 4):
            outputs, state = run("update", {"rows": ROWS, "position": ints(position)}, state)
            reads = [expected.copy()]
            expected[:, :, position : position + 2] = ROWS
            reads.append(expected.copy())
            expected[:, :, 2:4] = ROWS * 2
            for n, read in enumerate((*reads, expected)):
                check(outputs[f"read_{n}"], Expected(read))
            check(state, Expected(expected))


@pytest.mark.parametrize(("position", "slots"), [(5, [5]), (6, []), (-1, []), (-7, [0])])
def test_update_state_outside(runtimes, position, slots):
    """The executor refuses. Apple's runtime adds the size to a negative end once and clamps; what is left
    of the slice takes the first rows. slots: those that are written."""
    inputs = {"rows": ROWS, "position": ints(position)}
    with pytest.raises(ExecutorError, match="slice"):
        runtimes.executor("write", inputs)
    expected = half(np.zeros(SLOTS))
    expected[:, :, slots] = ROWS[:, :, : len(slots)]
    check(runtimes.apple("write", inputs)[1], Expected(expected))


@pytest.mark.parametrize("index", [-4, -1, 0, 2, 3, 2**31 - 1])
def test_gather_at_the_ends_and_outside(runtimes, index):
    inputs = LOOKUP | {"index": ints(index)}
    if 0 <= index < 3:
        check(runtimes.executor("look_up", inputs)[0]["found"], Expected(LOOKUP["x"][[index]]))
    else:
        with pytest.raises(ExecutorError, match=f"index {index} is out of bounds"):
            runtimes.executor("look_up", inputs)
    if -3 <= index < 3:
        check(runtimes.apple("look_up", inputs)[0]["found"], Expected(LOOKUP["x"][[index]]))
    else:
        with pytest.raises(RuntimeError, match=f"Index {index} is out of range"):
            runtimes.apple("look_up", inputs)


def test_nan_and_infinities_as_integers(runtimes):
    limits = np.iinfo(np.int32)
    found = runtimes.apple("as_integers", NOT_FINITE)[0]["found"]
    np.testing.assert_array_equal(found, [0, limits.max, limits.min])
