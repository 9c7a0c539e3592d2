"""Reductions, ordering, shapes, slices, gather and scatter against loops over elements."""

import itertools
import math

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb

from ss_executor import ExecutorError

from .harness import check_cases, run_graph

RNG = np.random.default_rng(3)
X = RNG.normal(size=(2, 3, 4)).astype(np.float32)
N = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
IMAGE = np.arange(2 * 8 * 4 * 6, dtype=np.float32).reshape(2, 8, 4, 6)


def places(shape):
    return itertools.product(*(range(size) for size in shape))


def lines(x, axis):
    """(place without the axis, list along the axis) for all lines."""
    for place in places(x.shape[:axis] + x.shape[axis + 1 :]):
        yield place, [x[place[:axis] + (i,) + place[axis:]].item() for i in range(x.shape[axis])]


def reduced(x, axis, function):
    out = np.empty(x.shape[:axis] + x.shape[axis + 1 :])
    for place, line in lines(x, axis):
        out[place] = function(line)
    return out


def test_reductions(tmp_path):
    functions = {
        "reduce_sum": sum, "reduce_mean": lambda a: sum(a) / len(a), "reduce_max": max,
        "reduce_min": min, "reduce_prod": math.prod,
        "reduce_l1_norm": lambda a: sum(map(abs, a)),
        "reduce_l2_norm": lambda a: math.sqrt(sum(b * b for b in a)),
        "reduce_sum_square": lambda a: sum(b * b for b in a),
        "reduce_log_sum_exp": lambda a: math.log(sum(map(math.exp, a))),
    }  # fmt: skip
    cases = []
    for name, function in functions.items():
        reduce = getattr(mb, name)
        cases += [
            (lambda v, f=reduce: f(x=v["x"], axes=[1]), reduced(X, 1, function)),
            (lambda v, f=reduce: f(x=v["x"], axes=[-1], keep_dims=True),
             reduced(X, 2, function)[..., None]),
            (lambda v, f=reduce: f(x=v["x"], axes=[0, 1, 2], keep_dims=True),
             np.array(function(X.reshape(-1).tolist())).reshape(1, 1, 1)),
        ]  # fmt: skip
    positive = lambda a: math.log(sum(b * b for b in a))  # noqa: E731
    cases += [
        (lambda v: mb.reduce_log_sum(x=mb.square(x=v["x"]), axes=[0]), reduced(X, 0, positive)),
        (lambda v: mb.reduce_sum(x=v["n"], axes=[0]), reduced(N, 0, sum).astype(int)),
        (
            lambda v: mb.reduce_argmax(x=v["x"], axis=1),
            reduced(X, 1, lambda a: a.index(max(a))).astype(int),
        ),
        (
            lambda v: mb.reduce_argmin(x=v["x"], axis=-1, keep_dims=True),
            reduced(X, 2, lambda a: a.index(min(a))).astype(int)[..., None],
        ),
    ]
    check_cases(tmp_path, {"x": X, "n": N}, cases)


def test_ties_go_to_the_lower_index(tmp_path):
    x = np.float32([[1, 3, 3, 2, 3, 0], [5, 5, 5, 5, 5, 5]])
    long = np.zeros((1, 200), np.float32)
    long[0, [10, 50, 150]] = [1, 2, 2]
    cases = [
        (lambda v: mb.reduce_argmax(x=v["x"], axis=1), np.array([1, 0])),
        (lambda v: mb.topk(x=v["x"], k=4, axis=1),
         [np.float32([[3, 3, 3, 2], [5, 5, 5, 5]]), np.array([[1, 2, 4, 3], [0, 1, 2, 3]])]),
        (lambda v: mb.topk(x=v["x"], k=2, axis=1, ascending=True),
         [np.float32([[0, 1], [5, 5]]), np.array([[5, 0], [0, 1]])]),
        (lambda v: mb.topk(x=v["long"], k=5),
         [np.float32([[2, 2, 1, 0, 0]]), np.array([[50, 150, 10, 0, 1]])]),
        (lambda v: mb.topk(x=v["long"], k=2, ascending=True),
         [np.float32([[0, 0]]), np.array([[0, 1]])]),
        (lambda v: mb.argsort(x=v["x"], axis=1), np.array([[1, 2, 4, 3, 0, 5], range(6)])),
        (lambda v: mb.argsort(x=v["x"], axis=1, ascending=True),
         np.array([[5, 0, 3, 1, 2, 4], range(6)])),
    ]  # fmt: skip
    check_cases(tmp_path, {"x": x, "long": long}, cases)


def test_topk_options(tmp_path):
    x = RNG.normal(size=(3, 40, 2)).astype(np.float32)
    best = np.empty((3, 3, 2), int)
    for (i, j), line in lines(x, 1):
        best[i, :, j] = sorted(range(40), key=lambda k: -line[k])[:3]
    values = np.array([[[x[i, best[i, r, j], j] for j in range(2)] for r in range(3)]
                       for i in range(3)])  # fmt: skip
    cases = [
        (lambda v: mb.topk(x=v["x"], k=3, axis=1), [values, best]),
        (lambda v: mb.topk(x=v["x"], k=3, axis=1, return_indices=False), values),
        (lambda v: mb.topk(x=v["x"], k=3, axis=-2, output_indices_dtype="uint16"), [values, best]),
    ]
    check_cases(tmp_path, {"x": x}, cases)


def test_shapes(tmp_path):
    flat = X.reshape(-1).tolist()
    cases = [
        (lambda v: mb.reshape(x=v["x"], shape=[4, -1]), np.array(flat).reshape(4, 6)),
        (lambda v: mb.reshape(x=v["x"], shape=[1, 0, -1, 0]), np.array(flat).reshape(1, 2, 3, 4)),
        (lambda v: mb.reshape_like(x=v["x"], ref_tensors=(v["n"], v["x"]), begins=(0, 1),
                                   ends=(1, 0), end_masks=(False, True)), X),
        (lambda v: mb.transpose(x=v["x"], perm=[2, 0, -2]),
         np.array([[[X[i, j, k] for j in range(3)] for i in range(2)] for k in range(4)])),
        (lambda v: mb.expand_dims(x=v["x"], axes=[0, -1]), np.array([X[..., None]])),
        (lambda v: mb.squeeze(x=mb.expand_dims(x=v["x"], axes=[0, 2]), axes=[0]),
         X.reshape(2, 1, 3, 4)),
        (lambda v: mb.squeeze(x=mb.expand_dims(x=v["x"], axes=[0, 2])), X),
        (lambda v: mb.flatten2d(x=v["x"], axis=-1), X.reshape(6, 4)),
        (lambda v: mb.shape(x=v["x"]), np.array([2, 3, 4])),
        (lambda v: mb.identity(x=v["x"]), X),
        (lambda v: mb.reverse(x=v["x"], axes=[2]),
         np.array([[[row[3 - k] for k in range(4)] for row in m] for m in X])),
        (lambda v: mb.reverse(x=v["x"]), np.array(flat[::-1]).reshape(2, 3, 4)),
        (lambda v: mb.reverse_sequence(x=v["x"], lengths=[2, 4], seq_axis=2, batch_axis=0),
         np.array([[[row[n - 1 - k] if k < n else row[k] for k in range(4)] for row in m]
                   for m, n in zip(X, (2, 4), strict=True)])),
        (lambda v: mb.sliding_windows(x=v["x"], axis=2, size=2, stride=2),
         np.array([[[[row[0], row[1]], [row[2], row[3]]] for row in m] for m in X])),
        (lambda v: mb.tile(x=v["x"], reps=[1, 2, 1]),
         np.array([[m[j % 3] for j in range(6)] for m in X])),
    ]  # fmt: skip
    check_cases(tmp_path, {"x": X, "n": N}, cases)


def test_combining(tmp_path):
    y = X + 10
    cases = [
        (lambda v: mb.concat(values=(v["x"], v["y"]), axis=1),
         np.array([list(a) + list(b) for a, b in zip(X, y, strict=True)])),
        (lambda v: mb.concat(values=(v["x"], v["y"]), axis=1, interleave=True),
         np.array([[(X, y)[j % 2][i, j // 2] for j in range(6)] for i in range(2)])),
        (lambda v: mb.stack(values=(v["x"], v["y"]), axis=1),
         np.array([[a, b] for a, b in zip(X, y, strict=True)])),
        (lambda v: mb.split(x=v["x"], split_sizes=[1, 2], axis=1),
         [X[:, :1], X[:, 1:]]),
        (lambda v: mb.split(x=v["x"], num_splits=2, axis=-1), [X[..., :2], X[..., 2:]]),
        (lambda v: mb.pad(x=v["x"], pad=[1, 2], mode="constant", constant_val=7.0),
         np.array([[[7, *row, 7, 7] for row in m] for m in X])),
        (lambda v: mb.pad(x=v["x"], pad=[1, 0, 2, 1], mode="reflect"),
         np.array([[[m[j][k] for k in (2, 1, 0, 1, 2, 3, 2)] for j in (1, 0, 1, 2)] for m in X])),
        (lambda v: mb.pad(x=v["x"], pad=[0, 1, 1, 0], mode="replicate"),
         np.array([[[m[j][k] for k in (0, 0, 1, 2, 3)] for j in (0, 1, 2, 2)] for m in X])),
        (lambda v: mb.fill(shape=[2, 2], value=1.5), np.full((2, 2), 1.5)),
        (lambda v: mb.fill_like(ref_tensor=v["x"], value=3), np.array([3] * 24).reshape(2, 3, 4)),
        (lambda v: mb.range_1d(start=2, end=mb.reduce_max(x=v["n"], axes=[0, 1, 2]), step=5),
         np.array([2, 7, 12, 17, 22])),
        (lambda v: mb.non_zero(x=mb.less(x=v["n"], y=2)), np.array([[0, 0, 0], [0, 0, 1]])),
        (lambda v: mb.band_part(x=v["x"], lower=1, upper=0),
         np.array([[[a if 0 <= j - k <= 1 else 0 for k, a in enumerate(row)]
                    for j, row in enumerate(m)] for m in X])),
    ]  # fmt: skip
    check_cases(tmp_path, {"x": X, "y": y, "n": N}, cases)


def test_one_hot_and_cumsum(tmp_path):
    hot = np.int32([[0, 2], [1, 4]])
    last = np.array([[[3.0 if k == i else -1.0 for k in range(4)] for i in row] for row in hot])
    middle = np.array([[[int(i == k) for i in row] for k in range(4)] for row in hot])

    def running(line, exclusive=False, reverse=False):
        line = line[::-1] if reverse else line
        sums = list(itertools.accumulate(line))
        sums = [0, *sums[:-1]] if exclusive else sums
        return sums[::-1] if reverse else sums

    def summed(axis, **options):
        out = np.empty_like(X)
        for place, line in lines(X, axis):
            for i, value in enumerate(running(line, **options)):
                out[place[:axis] + (i,) + place[axis:]] = value
        return out

    cases = [
        (lambda v: mb.one_hot(indices=v["hot"], one_hot_vector_size=4, on_value=3.0,
                              off_value=-1.0), last),
        (lambda v: mb.one_hot(indices=v["hot"], one_hot_vector_size=4, axis=1), middle),
        (lambda v: mb.cumsum(x=v["x"], axis=1), summed(1)),
        (lambda v: mb.cumsum(x=v["x"], axis=2, exclusive=True), summed(2, exclusive=True)),
        (lambda v: mb.cumsum(x=v["x"], axis=0, reverse=True), summed(0, reverse=True)),
        (lambda v: mb.cumsum(x=v["x"], axis=1, reverse=True, exclusive=True),
         summed(1, reverse=True, exclusive=True)),
        (lambda v: mb.cumsum(x=v["hot"], axis=1), np.array([[0, 2], [1, 5]])),
    ]  # fmt: skip
    check_cases(tmp_path, {"x": X, "hot": hot}, cases)


def test_slices(tmp_path):
    begin = np.int32([0, 1, 0])
    update = np.float32(RNG.normal(size=(2, 1, 4)))
    replaced = X.copy()
    for i, k in np.ndindex(2, 4):
        replaced[i, 1, k] = update[i, 0, k]
    strided = X.copy()
    for i, j in np.ndindex(2, 3):
        strided[i, j, 1], strided[i, j, 3] = 100 + i, 200 + j
    steps = np.float32([[[100 + i, 200 + j] for j in range(3)] for i in range(2)])
    cases = [
        (lambda v: mb.slice_by_index(x=v["x"], begin=[0, 1, 0], end=[2, 3, 4], stride=[1, 1, 2]),
         np.array([[[X[i, j, k] for k in (0, 2)] for j in (1, 2)] for i in (0, 1)])),
        (lambda v: mb.slice_by_index(x=v["x"], begin=[-1, 0, -3], end=[0, 2, -1],
                                     end_mask=[True, False, False]),
         np.array([[[X[1, j, k] for k in (1, 2)] for j in (0, 1)]])),
        (lambda v: mb.slice_by_index(x=v["x"], begin=[1, 0, 2], end=[0, 0, 0],
                                     begin_mask=[False, True, False],
                                     end_mask=[False, True, True],
                                     squeeze_mask=[True, False, False]),
         np.array([[X[1, j, k] for k in (2, 3)] for j in range(3)])),
        (lambda v: mb.slice_by_index(x=v["x"], begin=[0, 0, 3], end=[2, 3, 0], stride=[1, 1, -1],
                                     end_mask=[False, False, True]),
         np.array([[[X[i, j, 3 - k] for k in range(4)] for j in range(3)] for i in range(2)])),
        (lambda v: mb.slice_by_size(x=v["x"], begin=v["begin"], size=[2, 1, -1]), X[:, 1:2]),
        (lambda v: mb.slice_update(x=v["x"], update=v["update"], begin=v["begin"],
                                   end=mb.add(x=v["begin"], y=np.int32([2, 1, 4]))), replaced),
        (lambda v: mb.slice_update(x=v["x"], update=v["steps"], begin=[0, 0, 1], end=[0, 0, 4],
                                   stride=[1, 1, 2], begin_mask=[True, True, False],
                                   end_mask=[True, True, False]), strided),
        (lambda v: mb.slice_update(x=v["x"], update=mb.squeeze(x=v["update"], axes=[1]),
                                   begin=[0, 1, 0], end=[2, 0, 4],
                                   squeeze_mask=[False, True, False]), replaced),
    ]  # fmt: skip
    check_cases(tmp_path, {"x": X, "begin": begin, "update": update, "steps": steps}, cases)


def test_slice_update_outside_is_an_error(tmp_path):
    def graph(x, begin):
        end = mb.add(x=begin, y=np.int32([2]))
        return [mb.slice_update(x=x, update=np.float32([7, 7]), begin=begin, end=end)]

    inputs = {"x": np.zeros(4, np.float32), "begin": np.int32([3])}
    with pytest.raises(ExecutorError, match="the slice has shape") as caught:
        run_graph(tmp_path, graph, inputs)
    assert "\n" not in str(caught.value)


def test_gather(tmp_path):
    i = np.int32([[2, 0], [1, 1]])
    along = np.int32(RNG.integers(0, 3, size=(2, 2, 4)))
    nd = np.int32([[0, 2], [1, 1]])
    cases = [
        (lambda v: mb.gather(x=v["x"], indices=v["i"], axis=1),
         np.array([[[X[a, i[b, c]] for c in range(2)] for b in range(2)] for a in range(2)])),
        (lambda v: mb.gather(x=v["x"], indices=v["i"], axis=-1, batch_dims=1),
         np.array([[[X[a, b, i[a, c]] for c in range(2)] for b in range(3)] for a in range(2)])),
        (lambda v: mb.gather(x=v["x"], indices=mb.slice_by_index(
            x=v["i"], begin=[0, 0], end=[0, 0], squeeze_mask=[True, True]), axis=1),
         np.array([X[a, 2] for a in range(2)])),
        (lambda v: mb.gather_along_axis(x=v["x"], indices=v["along"], axis=1),
         np.array([[[X[a, along[a, b, c], c] for c in range(4)] for b in range(2)]
                   for a in range(2)])),
        (lambda v: mb.gather_nd(x=v["x"], indices=v["nd"]), np.array([X[0, 2], X[1, 1]])),
        (lambda v: mb.gather_nd(x=v["x"], indices=v["nd"], batch_dims=1),
         np.array([X[0, 0, 2], X[1, 1, 1]])),
        (lambda v: mb.gather(x=v["x"], indices=mb.cast(x=v["i"], dtype="uint16"), axis=2),
         np.array([[[[X[a, b, i[c, d]] for d in range(2)] for c in range(2)] for b in range(3)]
                   for a in range(2)])),
    ]  # fmt: skip
    check_cases(tmp_path, {"x": X, "i": i, "along": along, "nd": nd}, cases)


def test_negative_indices_follow_the_opset(tmp_path):
    x, i = np.float32([10, 20, 30]), np.int32([-1, 0])

    def graph(x, i):
        return [mb.gather(x=x, indices=i, axis=0)]

    (old,) = run_graph(tmp_path, graph, {"x": x, "i": i}, target=ct.target.iOS16)
    assert old.tolist() == [30, 10]
    with pytest.raises(ExecutorError, match="index -1 is out of bounds"):
        run_graph(tmp_path, graph, {"x": x, "i": i})


_COMBINE = {
    "update": lambda a, b: b, "add": lambda a, b: a + b, "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b, "div": lambda a, b: a / b, "max": max, "min": min,
}  # fmt: skip


def test_scatter(tmp_path):
    i = np.int32([2, 0])
    updates, nd_updates = RNG.normal(size=(2, 2, 4)), RNG.normal(size=(3, 4))
    updates, nd_updates = updates.astype(np.float32), nd_updates.astype(np.float32)
    nd = np.int32([[0, 2], [1, 1], [0, 0]])
    along = np.int32([[[2, 1, 0, 2], [1, 1, 1, 0]], [[0, 0, 0, 0], [2, 2, 2, 2]]])
    along[0, 1, 1] = 0
    cases = []
    for mode, combine in _COMBINE.items():
        flat, pointed, lined = X.copy(), X.copy(), X.copy()
        for a, b, c in np.ndindex(2, 2, 4):
            flat[a, i[b], c] = combine(flat[a, i[b], c], updates[a, b, c])
            place = (a, along[a, b, c], c)
            lined[place] = combine(lined[place], updates[a, b, c])
        for row, (a, b) in enumerate(nd):
            for c in range(4):
                pointed[a, b, c] = combine(pointed[a, b, c], nd_updates[row, c])
        cases += [
            (lambda v, m=mode: mb.scatter(data=v["x"], indices=v["i"], updates=v["u"], axis=1,
                                          mode=m), flat),
            (lambda v, m=mode: mb.scatter_nd(data=v["x"], indices=v["nd"], updates=v["w"],
                                             mode=m), pointed),
            (lambda v, m=mode: mb.scatter_along_axis(data=v["x"], indices=v["along"],
                                                     updates=v["u"], axis=1, mode=m), lined),
        ]  # fmt: skip
    inputs = {"x": X, "i": i, "u": updates, "nd": nd, "w": nd_updates, "along": along}
    check_cases(tmp_path, inputs, cases)


def test_scatter_adds_repeated_indices(tmp_path):
    i = np.int32([1, 1, 1])

    def graph(x, i):
        return [mb.scatter(data=x, indices=i, updates=np.float32([1, 2, 4]), axis=0, mode="add")]

    (result,) = run_graph(tmp_path, graph, {"x": np.float32([0, 10, 0]), "i": i})
    assert result.tolist() == [0, 17, 0]


def test_depth_and_space(tmp_path):
    n, c, h, w = IMAGE.shape
    deep, shuffled = np.empty((n, 2, 8, 12)), np.empty((n, 2, 8, 12))
    for b, k, y, x in np.ndindex(n, 2, 8, 12):
        inner = y % 2 * 2 + x % 2
        deep[b, k, y, x] = IMAGE[b, inner * 2 + k, y // 2, x // 2]
        shuffled[b, k, y, x] = IMAGE[b, k * 4 + inner, y // 2, x // 2]
    batched = np.empty((n * 4, c, 2, 3))
    for b, k, y, x in np.ndindex(n, c, 4, 6):
        batched[(y % 2 * 2 + x % 2) * n + b, k, y // 2, x // 2] = IMAGE[b, k, y, x]
    cases = [
        (lambda v: mb.depth_to_space(x=v["x"], block_size=2), deep),
        (lambda v: mb.pixel_shuffle(x=v["x"], upscale_factor=2), shuffled),
        (lambda v: mb.space_to_depth(x=v["deep"], block_size=2), IMAGE),
        (lambda v: mb.pixel_unshuffle(x=v["shuffled"], downscale_factor=np.uint32(2)), IMAGE),
        (lambda v: mb.space_to_batch(x=v["x"], block_shape=[2, 2], paddings=[[0, 0], [0, 0]]),
         batched),
        (lambda v: mb.batch_to_space(x=v["batched"], block_shape=[2, 2],
                                     crops=[[1, 0], [0, 2]]), IMAGE[:, :, 1:, :-2]),
    ]  # fmt: skip
    inputs = {
        "x": IMAGE, "deep": deep.astype(np.float32), "shuffled": shuffled.astype(np.float32),
        "batched": batched.astype(np.float32),
    }  # fmt: skip
    check_cases(tmp_path, inputs, cases)


def _resized(x, height, width, grid):
    """Bilinear values at the grid points of the documentation, one output at a time."""
    out = np.empty(x.shape[:2] + (height, width))
    rows, columns = grid(x.shape[2], height), grid(x.shape[3], width)
    for (i, r), (j, c) in itertools.product(enumerate(rows), enumerate(columns)):
        r, c = min(max(r, 0), x.shape[2] - 1), min(max(c, 0), x.shape[3] - 1)
        y0, x0 = int(r), int(c)
        y1, x1 = min(y0 + 1, x.shape[2] - 1), min(x0 + 1, x.shape[3] - 1)
        top = x[:, :, y0, x0] * (1 - (c - x0)) + x[:, :, y0, x1] * (c - x0)
        low = x[:, :, y1, x0] * (1 - (c - x0)) + x[:, :, y1, x1] * (c - x0)
        out[:, :, i, j] = top * (1 - (r - y0)) + low * (r - y0)
    return out


def test_resizing(tmp_path):
    x = RNG.normal(size=(1, 2, 3, 4)).astype(np.float32)

    def corners(size, target):
        return [i * (size - 1) / (target - 1) for i in range(target)]

    def centres(size, target):
        return [i * size / target + 0.5 * size / target - 0.5 for i in range(target)]

    def default(size, target):
        return [i * (size - size / target) / (target - 1) for i in range(target)]

    nearest = np.array([[[[m[i // 2][j // 3] for j in range(12)] for i in range(6)] for m in x[0]]])
    sized = np.array([[[[m[i * 3 // 5][j * 4 // 7] for j in range(7)] for i in range(5)]
                       for m in x[0]]])  # fmt: skip
    cases = [
        (lambda v: mb.upsample_nearest_neighbor(x=v["x"], scale_factor_height=2,
                                                scale_factor_width=3), nearest),
        (lambda v: mb.resize_nearest_neighbor(x=v["x"], target_size_height=5,
                                              target_size_width=7), sized),
        (lambda v: mb.upsample_bilinear(x=v["x"], scale_factor_height=2, scale_factor_width=3,
                                        align_corners=True), _resized(x, 6, 12, corners)),
        (lambda v: mb.upsample_bilinear(x=v["x"], scale_factor_height=2, scale_factor_width=2,
                                        align_corners=False), _resized(x, 6, 8, centres)),
        (lambda v: mb.resize_bilinear(x=v["x"], target_size_height=5, target_size_width=7,
                                      sampling_mode="DEFAULT"), _resized(x, 5, 7, default)),
        (lambda v: mb.resize_bilinear(x=v["x"], target_size_height=5, target_size_width=7,
                                      sampling_mode="UNALIGN_CORNERS"), _resized(x, 5, 7, centres)),
    ]  # fmt: skip
    check_cases(tmp_path, {"x": x}, cases)


def test_control_flow(tmp_path):
    def graph(x, n):
        def body(i, total):
            return mb.add(x=i, y=1), mb.add(x=total, y=x)

        start = mb.fill_like(ref_tensor=x, value=0.0)
        zero = mb.sub(x=n, y=n)
        _, total = mb.while_loop(
            _cond=lambda i, total: mb.squeeze(x=mb.less(x=i, y=n)), _body=body,
            loop_vars=(zero, start),
        )  # fmt: skip
        big = mb.greater(x=mb.reduce_sum(x=n, axes=[0], keep_dims=False), y=2)
        chosen = mb.cond(
            pred=big, _true_fn=lambda: mb.mul(x=total, y=2.0), _false_fn=lambda: mb.identity(x=x)
        )
        return [total, chosen]

    x = np.float32([1, 2])
    for count in (2, 3):
        total, chosen = run_graph(tmp_path, graph, {"x": x, "n": np.int32([count])})
        assert total.tolist() == [count, 2 * count]
        assert chosen.tolist() == ([6, 12] if count == 3 else [1, 2])
