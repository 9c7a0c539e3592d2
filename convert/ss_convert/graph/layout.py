"""How rows of features lie in the graph: matrices for `linear`, or (1, C, 1, S) for 1×1 convolutions.

Everything that touches rows goes through one of these two classes, so the layers are written once.
`rows` below is a layout's own form of n rows of w features; `matrix` is always [n, w].
"""

from __future__ import annotations

from collections.abc import Sequence

from ss_convert.graph.operations import op


class LinearLayout:
    """Rows are matrices [n, w]."""

    feature_axis, row_axis = -1, 0
    # Axes of size 1 behind a weight [out, in].
    trailing = 0

    def enter(self, matrix):
        """[n, w] → rows."""
        return matrix

    def leave(self, rows):
        """Rows → [n, w]."""
        return rows

    def product(self, rows, weight, bias=None):
        """Rows times a weight [out, in] → rows of `out` features."""
        return op.linear(rows, weight=weight, bias=bias)

    def heads(self, rows, count: int):
        """Rows of count·d features → [count, n, d]."""
        n, width = rows.shape
        return op.transpose(op.reshape(rows, shape=[n, count, width // count]), perm=[1, 0, 2])

    def from_heads(self, heads):
        """[count, n, d] → rows of count·d features."""
        count, n, d = heads.shape
        return op.reshape(op.transpose(heads, perm=[1, 0, 2]), shape=[n, count * d])

    def split(self, rows, sizes: Sequence[int]) -> list:
        """Consecutive rows."""
        return slices(rows, sizes, self.row_axis)

    def join(self, values: list):
        """Rows behind one another."""
        return op.concat(values, axis=self.row_axis)

    def num_rows(self, rows) -> int:
        return rows.shape[self.row_axis]


class ConvLayout(LinearLayout):
    """Rows are [1, w, 1, n], products are 1×1 convolutions (docs/platform.md, Neural Engine)."""

    feature_axis, row_axis = 1, 3
    trailing = 2

    def enter(self, matrix):
        """[n, w] → [1, w, 1, n]."""
        return op.expand_dims(op.transpose(matrix, perm=[1, 0]), axes=[0, 2])

    def leave(self, rows):
        """[1, w, 1, n] → [n, w]."""
        return op.transpose(op.squeeze(rows, axes=[0, 2]), perm=[1, 0])

    def product(self, rows, weight, bias=None):
        """Rows times a weight [out, in, 1, 1]."""
        return op.conv(rows, weight=weight, bias=bias)

    def heads(self, rows, count: int):
        """[1, count·d, 1, n] → [count, n, d]."""
        _, width, _, n = rows.shape
        return op.transpose(op.reshape(rows, shape=[count, width // count, n]), perm=[0, 2, 1])

    def from_heads(self, heads):
        """[count, n, d] → [1, count·d, 1, n]."""
        count, n, d = heads.shape
        return op.reshape(op.transpose(heads, perm=[0, 2, 1]), shape=[1, count * d, 1, n])


LAYOUTS = {"linear": LinearLayout, "conv": ConvLayout}


def slices(x, sizes: Sequence[int], axis: int) -> list:
    """Consecutive slices of `x` along `axis`."""
    axis = axis % len(x.shape)
    begin, parts = [0] * len(x.shape), []
    for extent in sizes:
        size = list(x.shape)
        size[axis] = extent
        parts.append(op.slice_by_size(x, begin=list(begin), size=size))
        begin[axis] += extent
    return parts
