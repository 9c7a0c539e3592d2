"""Matrix products (MIL: linear, matmul, einsum, scaled_dot_product_attention)."""

import numpy as np

from ..registry import op
from .activation import softmax


@op("linear")
def linear(call, x, weight, bias=None):
    """MIL linear: x (*, I) · weight (O, I) transposed + bias (O,) -> (*, O)."""
    result = np.matmul(x, weight.T)
    if bias is not None:
        result += bias
    return result


@op("matmul")
def matmul(call, x, y, transpose_x=False, transpose_y=False):
    """MIL matmul: numpy's rules; transpose_* swaps the last two axes of inputs of rank > 1."""
    if bool(transpose_x) and x.ndim > 1:
        x = np.swapaxes(x, -1, -2)
    if bool(transpose_y) and y.ndim > 1:
        y = np.swapaxes(y, -1, -2)
    return np.matmul(x, y)


def _as_matrices(x: np.ndarray, axes: str, rows: list[str], batch: list[str], columns: list[str]):
    """Axes of x in the order batch, rows, columns, each of the latter two folded into one."""
    order = [axes.index(letter) for letter in batch + rows + columns]
    x = np.transpose(x, order)
    size = [int(np.prod(x.shape[start:stop])) for start, stop in (
        (len(batch), len(batch) + len(rows)), (len(batch) + len(rows), x.ndim))]  # fmt: skip
    return x.reshape(x.shape[: len(batch)] + tuple(size))


@op("einsum", tuples=("values",))
def einsum(call, values, equation):
    """MIL einsum of two tensors, as one batched matrix product (size-1 batch axes broadcast)."""
    x, y = values
    left, result = equation.replace(" ", "").split("->")
    first, second = left.split(",")
    batch = [c for c in result if c in first and c in second]
    summed = [c for c in first if c in second and c not in result]
    rows = [c for c in first if c not in second and c in result]
    columns = [c for c in second if c not in first and c in result]
    simple = len(batch) + len(summed) + len(rows) == len(first) == len(set(first))
    simple &= len(batch) + len(summed) + len(columns) == len(second) == len(set(second))
    if not simple or any(x.shape[first.index(c)] != y.shape[second.index(c)] for c in summed):
        return np.einsum(equation, x, y)
    product = np.matmul(
        _as_matrices(x, first, rows, batch, summed), _as_matrices(y, second, summed, batch, columns)
    )
    sizes = [x.shape[first.index(c)] for c in rows] + [y.shape[second.index(c)] for c in columns]
    product = product.reshape(product.shape[: len(batch)] + tuple(sizes))
    order = batch + rows + columns
    return np.transpose(product, [order.index(c) for c in result])


@op("scaled_dot_product_attention")
def scaled_dot_product_attention(call, query, key, value, attn_mask=None):
    """MIL scaled_dot_product_attention.

    query (B, *, L, E), key (B, *, S, E), value (B, *, S, EV), attn_mask broadcastable to
    (B, *, L, S), bool (true takes part) or float (added) -> (B, *, L, EV). One rounding, at the
    end. A row whose mask is all false gives not-a-number, as in PyTorch.
    """
    scale = np.float32(1.0 / np.sqrt(query.shape[-1]))
    scores = np.matmul(query * scale, np.swapaxes(key, -1, -2))
    if attn_mask is not None:
        if attn_mask.dtype == np.bool_:
            scores = np.where(attn_mask, scores, np.float32(-np.inf))
        else:
            scores = scores + attn_mask
    return np.matmul(softmax(call, scores), value)
