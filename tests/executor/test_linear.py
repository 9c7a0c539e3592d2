"""Matrix products, convolution, pooling and normalisation against loops and PyTorch."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from coremltools.converters.mil import Builder as mb

from .harness import check_cases

RNG = np.random.default_rng(2)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def product(a, b):
    """Matrix product by the definition."""
    return np.array(
        [[sum(a[i, k] * b[k, j] for k in range(a.shape[1])) for j in range(b.shape[1])]
         for i in range(a.shape[0])]
    )  # fmt: skip


def test_matmul_and_linear(tmp_path):
    a, b, w, bias = normal(2, 3, 4), normal(4, 5), normal(6, 4), normal(6)
    many, vector = normal(2, 4, 5), normal(4)
    swapped = a.transpose(0, 2, 1).copy()
    each = np.stack([product(m, b) for m in a])
    paired = np.stack([product(m, n) for m, n in zip(a, many, strict=True)])
    weighted = np.stack([product(m, w.T) for m in a]) + bias
    variables = {"a": a, "b": b, "m": many, "v": vector, "s": swapped, "w": w}
    cases = [
        (lambda v: mb.matmul(x=v["a"], y=v["b"]), each),
        (lambda v: mb.matmul(x=v["a"], y=v["m"]), paired),
        (lambda v: mb.matmul(x=v["s"], y=v["m"], transpose_x=True), paired),
        (lambda v: mb.matmul(x=v["a"], y=v["w"], transpose_y=True), weighted - bias),
        (lambda v: mb.matmul(x=v["v"], y=v["b"]), product(vector[None], b)[0]),
        (lambda v: mb.linear(x=v["a"], weight=w, bias=bias), weighted),
        (lambda v: mb.linear(x=v["a"], weight=w), weighted - bias),
    ]
    check_cases(tmp_path, variables, cases)


def test_einsum(tmp_path):
    x, y = normal(2, 3, 4, 5), normal(2, 5, 4, 6)
    one = normal(2, 5, 1, 6)
    x3, y3 = normal(3, 4, 5), normal(5, 4, 6)

    def contract(x, y):
        out = np.zeros((2, 3, 4, 6))
        for n, c, h, u, w in np.ndindex(2, 3, 4, 6, 5):
            out[n, c, h, u] += x[n, c, h, w] * y[n, w, h % y.shape[2], u]
        return out

    flat = np.zeros((3, 4, 6))
    for c, h, r, w in np.ndindex(3, 4, 6, 5):
        flat[c, h, r] += x3[c, h, w] * y3[w, h, r]
    cases = [
        (lambda v: mb.einsum(values=(v["x"], v["y"]), equation="nchw,nwhu->nchu"), contract(x, y)),
        (lambda v: mb.einsum(values=(v["x"], v["o"]), equation="nchw,nwhu->nchu"),
         contract(x, one)),
        (lambda v: mb.einsum(values=(v["p"], v["q"]), equation="chw,whr->chr"), flat),
    ]  # fmt: skip
    check_cases(tmp_path, {"x": x, "y": y, "o": one, "p": x3, "q": y3}, cases)


def test_scaled_dot_product_attention(tmp_path):
    q, k, v = normal(1, 2, 3, 8), normal(1, 2, 5, 8), normal(1, 2, 5, 4)
    visible = np.array([[1, 1, 0, 1, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]], np.int32)
    extra = normal(3, 5)

    def attend(bias):
        out = np.zeros((1, 2, 3, 4))
        for h, i in np.ndindex(2, 3):
            scores = [
                sum(q[0, h, i, e] * k[0, h, j, e] for e in range(8)) / math.sqrt(8) + bias[i][j]
                for j in range(5)
            ]
            weights = [math.exp(s) for s in scores]
            for j in range(5):
                out[0, h, i] += weights[j] / sum(weights) * v[0, h, j]
        return out

    hidden = [[0.0 if seen else -math.inf for seen in row] for row in visible.tolist()]
    names = ("query", "key", "value")

    def sdpa(v, **more):
        return mb.scaled_dot_product_attention(**{name: v[name] for name in names}, **more)

    cases = [
        (lambda v: sdpa(v), attend(np.zeros((3, 5)))),
        (lambda v: sdpa(v, attn_mask=v["extra"]), attend(extra)),
        (lambda v: sdpa(v, attn_mask=mb.cast(x=v["visible"], dtype="bool")), attend(hidden)),
    ]
    inputs = {"query": q, "key": k, "value": v, "extra": extra, "visible": visible}
    check_cases(tmp_path, inputs, cases)


def _torch(function, *arrays, **options):
    return function(*(torch.from_numpy(np.ascontiguousarray(a)) for a in arrays), **options).numpy()


def test_conv(tmp_path):
    x, line = normal(2, 4, 7, 8), normal(2, 4, 9)
    w, bias = normal(6, 4, 3, 2), normal(6)
    grouped, depthwise, pointwise = normal(6, 2, 3, 3), normal(4, 1, 3, 3), normal(5, 4, 1, 1)
    w1 = normal(3, 4, 3)
    # "same" with stride 2: outputs ceil(7/2)=4 and ceil(8/2)=4; kernel (3, 2) needs (2, 0) more.
    same = _torch(F.conv2d, np.pad(x, [(0, 0), (0, 0), (1, 1), (0, 0)]), w, stride=2)
    # Kernel 2 in both directions, stride 1: one more element, after ("same") or before.
    even = normal(6, 4, 2, 2)
    after = _torch(F.conv2d, np.pad(x, [(0, 0), (0, 0), (0, 1), (0, 1)]), even)
    before = _torch(F.conv2d, np.pad(x, [(0, 0), (0, 0), (1, 0), (1, 0)]), even)
    custom = np.pad(x, [(0, 0), (0, 0), (1, 2), (3, 0)])
    cases = [
        (lambda v: mb.conv(x=v["x"], weight=w, bias=bias),
         _torch(F.conv2d, x, w, bias)),
        (lambda v: mb.conv(x=v["x"], weight=w, strides=[2, 2], pad_type="same"), same),
        (lambda v: mb.conv(x=v["x"], weight=even, pad_type="same"), after),
        (lambda v: mb.conv(x=v["x"], weight=even, pad_type="same_lower"), before),
        (lambda v: mb.conv(x=v["x"], weight=w, pad_type="custom", pad=[1, 2, 3, 0],
                           strides=[2, 1], dilations=[1, 2]),
         _torch(F.conv2d, custom, w, stride=(2, 1), dilation=(1, 2))),
        (lambda v: mb.conv(x=v["x"], weight=grouped, groups=2, bias=bias),
         _torch(F.conv2d, x, grouped, bias, groups=2)),
        (lambda v: mb.conv(x=v["x"], weight=depthwise, groups=4, pad_type="custom",
                           pad=[1, 1, 1, 1]),
         _torch(F.conv2d, x, depthwise, groups=4, padding=1)),
        (lambda v: mb.conv(x=v["x"], weight=pointwise), _torch(F.conv2d, x, pointwise)),
        (lambda v: mb.conv(x=v["x"], weight=pointwise, strides=[2, 3]),
         _torch(F.conv2d, x, pointwise, stride=(2, 3))),
        (lambda v: mb.conv(x=v["line"], weight=w1, strides=[2]),
         _torch(F.conv1d, line, w1, stride=2)),
        (lambda v: mb.conv(x=v["line"], weight=v["w1"]), _torch(F.conv1d, line, w1)),
    ]  # fmt: skip
    check_cases(tmp_path, {"x": x, "line": line, "w1": w1}, cases, tolerance=2e-5)


def test_conv_transpose(tmp_path):
    x, line = normal(2, 4, 5, 6), normal(2, 4, 5)
    w, grouped, w1, bias = normal(4, 3, 3, 2), normal(4, 2, 3, 3), normal(4, 3, 4), normal(3)
    whole = _torch(F.conv_transpose2d, x, w, stride=2)
    cases = [
        (lambda v: mb.conv_transpose(x=v["x"], weight=w, bias=bias),
         _torch(F.conv_transpose2d, x, w, bias)),
        (lambda v: mb.conv_transpose(x=v["x"], weight=w, strides=[2, 3], dilations=[2, 1]),
         _torch(F.conv_transpose2d, x, w, stride=(2, 3), dilation=(2, 1))),
        (lambda v: mb.conv_transpose(x=v["x"], weight=grouped, groups=2, pad_type="custom",
                                     pad=[1, 1, 1, 1]),
         _torch(F.conv_transpose2d, x, grouped, groups=2, padding=1)),
        (lambda v: mb.conv_transpose(x=v["x"], weight=w, strides=[2, 2], pad_type="custom",
                                     pad=[1, 0, 0, 1]), whole[:, :, 1:, :-1]),
        (lambda v: mb.conv_transpose(x=v["x"], weight=grouped, strides=[2, 2], groups=2,
                                     pad_type="custom", pad=[1, 1, 1, 1],
                                     output_shape=[2, 4, 10, 12]),
         _torch(F.conv_transpose2d, x, grouped, stride=2, groups=2, padding=1, output_padding=1)),
        (lambda v: mb.conv_transpose(x=v["line"], weight=w1, strides=[2]),
         _torch(F.conv_transpose1d, line, w1, stride=2)),
    ]  # fmt: skip
    check_cases(tmp_path, {"x": x, "line": line}, cases, tolerance=2e-5)


def test_pooling(tmp_path):
    x, line = normal(2, 3, 7, 9), normal(2, 3, 8)
    pads = [1, 1, 1, 1]
    squares = _torch(F.avg_pool2d, x * x, kernel_size=(2, 3)) * 6
    cases = [
        (lambda v: mb.max_pool(x=v["x"], kernel_sizes=[3, 2], strides=[2, 2], pad_type="valid"),
         _torch(F.max_pool2d, x, kernel_size=(3, 2), stride=2)),
        (lambda v: mb.max_pool(x=v["x"], kernel_sizes=[3, 3], strides=[2, 2], pad_type="custom",
                               pad=pads, ceil_mode=True),
         _torch(F.max_pool2d, x, kernel_size=3, stride=2, padding=1, ceil_mode=True)),
        (lambda v: mb.max_pool(x=v["line"], kernel_sizes=[2], strides=[2], pad_type="valid"),
         _torch(F.max_pool1d, line, kernel_size=2)),
        (lambda v: mb.avg_pool(x=v["x"], kernel_sizes=[3, 3], strides=[2, 2], pad_type="custom",
                               pad=pads, exclude_padding_from_average=True),
         _torch(F.avg_pool2d, x, kernel_size=3, stride=2, padding=1, count_include_pad=False)),
        (lambda v: mb.avg_pool(x=v["x"], kernel_sizes=[3, 3], strides=[2, 2], pad_type="custom",
                               pad=pads),
         _torch(F.avg_pool2d, x, kernel_size=3, stride=2, padding=1)),
        (lambda v: mb.avg_pool(x=v["line"], kernel_sizes=[3], strides=[2], pad_type="custom",
                               pad=[1, 1], ceil_mode=True),
         _torch(F.avg_pool1d, line, kernel_size=3, stride=2, padding=1, ceil_mode=True)),
        (lambda v: mb.max_pool(x=v["x"], kernel_sizes=[2, 2], strides=[1, 1], pad_type="same"),
         _torch(F.max_pool2d, np.pad(x, [(0, 0), (0, 0), (0, 1), (0, 1)],
                                     constant_values=-9e9), kernel_size=2, stride=1)),
        (lambda v: mb.l2_pool(x=v["x"], kernel_sizes=[2, 3], strides=[2, 3], pad_type="valid"),
         np.sqrt(squares)),
    ]  # fmt: skip
    check_cases(tmp_path, {"x": x, "line": line}, cases)


def test_normalization(tmp_path):
    x, image = normal(2, 3, 4) * 3 + 1, normal(2, 3, 4, 5)
    gamma, beta = normal(4), normal(4)
    g, b, mean, variance = normal(3), normal(3), normal(3), np.abs(normal(3)) + 0.1

    def layer_norm(rows, epsilon, scale, shift):
        out = np.empty_like(rows, dtype=np.float64)
        for place in np.ndindex(rows.shape[:-1]):
            row = [float(a) for a in rows[place]]
            centre = sum(row) / len(row)
            spread = sum((a - centre) ** 2 for a in row) / len(row)
            out[place] = [(a - centre) / math.sqrt(spread + epsilon) for a in row]
        return out * scale + shift

    flat = layer_norm(x.reshape(1, -1), 1e-5, 1, 0).reshape(x.shape)
    two = layer_norm(x.reshape(2, -1), 1e-3, 1, 0).reshape(x.shape)
    length = [math.sqrt(sum(float(a) ** 2 for a in item.reshape(-1)) + 1e-6) for item in image]
    cases = [
        (lambda v: mb.layer_norm(x=v["x"], axes=[-1], gamma=gamma, beta=beta, epsilon=1e-3),
         layer_norm(x, 1e-3, gamma, beta)),
        (lambda v: mb.layer_norm(x=v["x"], axes=[0, 1, 2], epsilon=1e-5), flat),
        (lambda v: mb.layer_norm(x=v["x"], axes=[1, 2], epsilon=1e-3), two),
        (lambda v: mb.batch_norm(x=v["image"], mean=mean, variance=variance, gamma=g, beta=b),
         _torch(F.batch_norm, image, mean, variance, g, b, eps=1e-5)),
        (lambda v: mb.instance_norm(x=v["image"], gamma=g, beta=b, epsilon=1e-3),
         torch.from_numpy(image).sub(torch.from_numpy(image).mean((2, 3), keepdim=True)).div(
             (torch.from_numpy(image).var((2, 3), unbiased=False, keepdim=True) + 1e-3).sqrt()
         ).numpy() * g[:, None, None] + b[:, None, None]),
        (lambda v: mb.l2_norm(x=v["image"], epsilon=1e-6),
         np.stack([item / size for item, size in zip(image, length, strict=True)])),
        (lambda v: mb.local_response_norm(x=v["image"], size=2, alpha=0.3, beta=0.6, k=1.5),
         _torch(F.local_response_norm, image, size=2, alpha=0.3, beta=0.6, k=1.5)),
    ]  # fmt: skip
    check_cases(tmp_path, {"x": x, "image": image}, cases, tolerance=3e-5)


@pytest.mark.parametrize("scale", [1, 100])
def test_matmul_accumulates_in_float32(tmp_path, scale):
    """2048 products summed in fp16 would stop growing at 2048; in float32 they do not."""
    from .harness import run_graph

    x = np.full((1, 4096), 1.0, np.float16)
    w = np.full((1, 4096), 1.0 / scale, np.float16)
    (result,) = run_graph(tmp_path, lambda x: [mb.linear(x=x, weight=w)], {"x": x}, "float16")
    assert result[0, 0] == np.float16(4096 * float(w[0, 0]))
