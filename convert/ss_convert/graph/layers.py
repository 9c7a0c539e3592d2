"""Pieces of a decoder as MIL operations: embedding, norm, projections, rotary positions, attention, MLP.

Rows lie as the layout says (`layout.py`); heads are [heads, rows, head_dim]. Everything is fp16, built as
such: no conversion pass decides a precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ss_convert.graph.attention import attention_of, for_attention, soft_cap
from ss_convert.graph.compression import num_rows, row_parts
from ss_convert.graph.layout import LAYOUTS
from ss_convert.graph.layout import slices as split
from ss_convert.graph.operations import op
from ss_convert.graph.options import GraphOptions
from ss_convert.graph.parts import Part, whole
from ss_convert.graph.tables import REST_SCALE, RotaryTable
from ss_convert.graph.weights import ExportWeights
from ss_device import lora_names
from ss_device.architecture import Architecture, block_of

# Adds something to a projection's output: (layer, name, input rows, output rows) → output rows.
Correction = Callable[[int, str, object, object], object]


@dataclass(frozen=True)
class Rotary:
    """Rotary rows [rows, rotated]: cosine and sine for queries (scaled as queries are) and keys."""

    query_cos: object
    query_sin: object
    key_cos: object
    key_sin: object


@dataclass(frozen=True)
class View:
    """What layers with one window see: additive mask [rows, keys], and rotary rows (None: learned)."""

    mask: object
    rotary: Rotary | None


class Decoder:
    """Builds the base model's pieces into the function that is being built, each constant once.

    part: the layers that the function holds; all of them by default.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: ExportWeights,
        options: GraphOptions | None = None,
        part: Part | None = None,
    ) -> None:
        options = options or GraphOptions()
        self.part = part or whole(architecture)
        self.architecture = for_attention(architecture, options.attention)
        self.weights = weights
        self.layout = LAYOUTS[options.layout]()
        self._attend = attention_of(architecture, options.attention)
        self._head_split = options.head_split
        self._constants: dict[str, object] = {}

    def constant(self, name: str, value: Callable[[], np.ndarray]):
        """A named constant, made when first asked for."""
        if name not in self._constants:
            self._constants[name] = op.constant(value(), name.replace(".", "_"))
        return self._constants[name]

    def weight(self, name: str):
        """A base weight as it is stored, decompressed where it is compressed."""
        if name not in self._constants:
            self._constants[name] = op.weight(name.replace(".", "_"), self.weights.stored(name))
        return self._constants[name]

    def matrix(self, name: str):
        """A projection's weight as the layout's product takes it."""
        key = f"{name}, for products"
        if key not in self._constants:
            stored = self.weights.stored(name)
            self._constants[key] = op.weight(name.replace(".", "_"), stored, self.layout.trailing)
        return self._constants[key]

    def _table_rows(self, name: str, indices):
        """Rows of embedding or head [n, h], from the constant that products use."""
        rows = op.gather(self.matrix(name), indices=indices, axis=0)
        return op.squeeze(rows, axes=[2, 3]) if self.layout.trailing else rows

    def embed(self, tokens, positions):
        """Token ids and positions [n] → rows, with their scale and learned positions."""
        rows = self._table_rows("embed.weight", tokens)
        rows = times(rows, self.architecture.embedding_scale)
        if self.architecture.positions == "learned":
            rows = op.add(rows, self.learned(positions))
        return self.layout.enter(rows)

    def learned(self, positions):
        """Rows of the learned positions [n] → [n, h]; beyond the table's end its last row."""
        a = self.architecture
        last = op.minimum(positions, np.int32(a.max_positions - 1))
        index = op.add(last, np.int32(a.position_offset))
        return op.gather(self.weight("positions.weight"), indices=index, axis=0)

    def head(self, rows):
        """Final-normed rows → logits [n, V]; a big vocabulary in parts of `head_split`."""
        parts = self._head_parts()
        logits = [self.layout.leave(self.layout.product(rows, *part)) for part in parts]
        out = logits[0] if len(logits) == 1 else op.concat(logits, axis=1)
        return soft_cap(out, self.architecture.logit_softcap)

    def _head_parts(self) -> list[tuple]:
        """Weight and bias of the head's products, made once."""
        key = "head, in parts"
        if key not in self._constants:
            self._constants[key] = self._make_head_parts()
        return self._constants[key]

    def _make_head_parts(self) -> list[tuple]:
        name, layout = self._head, self.layout
        bias = self.weights.base("head.bias") if self.architecture.head_bias else None
        if not 0 < self._head_split < self.architecture.vocab_size:
            return [(self.matrix(name), bias)]
        return [
            (
                op.weight(f"head_part_{start}", part, layout.trailing),
                None if bias is None else bias[start : start + num_rows(part)],
            )
            for start, part in row_parts(self.weights.stored(name), self._head_split)
        ]

    def head_at(self, rows, tokens):
        """Final-normed rows → their logits of some tokens [m] alone: [n, m]."""
        columns = self._table_rows(self._head, tokens)
        out = op.matmul(self.layout.leave(rows), columns, transpose_y=True)
        if self.architecture.head_bias:
            out = op.add(out, op.gather(self.weight("head.bias"), indices=tokens, axis=0))
        return soft_cap(out, self.architecture.logit_softcap)

    @property
    def _head(self) -> str:
        return "embed.weight" if self.architecture.tied_head else "head.weight"

    def norm(self, rows, name: str):
        """The norm `name` of rows."""
        if self.architecture.norm == "layer":
            return self._layer_norm(rows, name)
        return self.rms_norm(rows, name, self.layout.feature_axis)

    def _layer_norm(self, rows, name: str):
        beta = self.weight(f"{name}.bias") if self.architecture.norm_bias else None
        gain = self.constant(f"{name}.gain", lambda: self._gain(name))
        return op.layer_norm(rows, self.layout.feature_axis, gain, beta, self.architecture.norm_eps)

    def rms_norm(self, rows, name: str, axis: int = -1):
        """RMSNorm over `axis`."""
        gain = self.constant(f"{name}.pair", lambda: op.rms_gain(self._gain(name)))
        return op.rms_norm(rows, axis, gain, self.architecture.norm_eps)

    def _gain(self, name: str) -> np.ndarray:
        gain = self.weights.base(f"{name}.weight")
        offset = self.architecture.norm_offset
        return (gain.astype(np.float32) + np.float32(offset)).astype(np.float16) if offset else gain

    def project(self, layer: int, name: str, rows, correction: Correction | None = None):
        """A layer's linear projection `q k v o gate up down` of rows with `in` features."""
        path = f"layers.{layer}.{block_of(name)}.{name}"
        bias = self.weight(f"{path}.bias") if name in self.architecture.biases else None
        out = self.layout.product(rows, self.matrix(f"{path}.weight"), bias)
        if (lora := self.weights.lora(path)) is not None:
            out = op.add(out, self.low_rank(lora_names.PREFIX + path, rows, *lora))
        return out if correction is None else correction(layer, name, rows, out)

    def keys_values(self, layer: int, normed, rotary, correction: Correction | None = None):
        """Rotated keys and values [n_kv, n, head_dim] of normed rows."""
        heads = self.architecture.num_kv_heads
        keys = self.layout.heads(self.project(layer, "k", normed, correction), heads)
        values = self.layout.heads(self.project(layer, "v", normed, correction), heads)
        if self.architecture.qk_norm:
            keys = self.rms_norm(keys, f"layers.{layer}.attn.k_norm")
        return (rotate(keys, rotary.key_cos, rotary.key_sin) if rotary else keys), values

    def queries(self, layer: int, normed, rotary, correction: Correction | None = None):
        """Rotated, scaled queries [H, n, head_dim] of normed rows."""
        q = self.project(layer, "q", normed, correction)
        q = self.layout.heads(q, self.architecture.num_heads)
        if self.architecture.qk_norm:
            q = self.rms_norm(q, f"layers.{layer}.attn.q_norm")
        scale = self.architecture.query_scale
        return rotate(q, rotary.query_cos, rotary.query_sin, scale) if rotary else times(q, scale)

    def attention(self, layer: int, normed, view: View, past: tuple, correction=None, turn=None):
        """Attention of normed rows [n, h] over past keys and values [n_kv, C, d] and their own.

        turn: what happens to the rows' values [n_kv, n, d], if anything.
        → (rows [n, h], not yet added to the residual, (keys, values) of the n rows).
        """
        k, v = self.keys_values(layer, normed, view.rotary, correction)
        v = v if turn is None else turn(v)
        attended = (
            self.queries(layer, normed, view.rotary, correction),
            op.concat([past[0], k], axis=1),
            op.concat([past[1], v], axis=1),
            view.mask,
        )
        mixed = self._attend(*attended, self.architecture.attention_softcap)
        out = self.project(layer, "o", self.layout.from_heads(mixed), correction)
        return self.post_norm(out, f"layers.{layer}.attn_post_norm"), (k, v)

    def low_rank(self, name: str, rows, down, up, scale=1.0):
        """scale · up(down(rows)), no activation. down [r, in], up [out, r]: fp16, constants or inputs.

        name: what the constants are called in the package.
        """
        if not isinstance(down, np.ndarray):
            return self._low_rank_of_inputs(rows, down, up, scale)
        scaled = up.astype(np.float32) * np.float32(scale)
        exact = np.array_equal(scaled.astype(np.float16).astype(np.float32), scaled)
        factor = scaled.astype(np.float16) if exact else up
        ones = (1,) * self.layout.trailing
        first = self.constant(f"{name}.down", lambda: down.reshape(down.shape + ones))
        second = self.constant(f"{name}.up", lambda: factor.reshape(factor.shape + ones))
        out = self.layout.product(self.layout.product(rows, first), second)
        # A scale that is no power of two would round every weight; rounding the scale alone is closer.
        return out if exact else op.mul(out, np.float16(scale))

    def _low_rank_of_inputs(self, rows, down, up, scale):
        """The same as matrix products: a convolution wants constant weights. scale: input or number."""
        inner = op.matmul(self.layout.leave(rows), down, transpose_y=True)
        out = op.matmul(inner, up, transpose_y=True)
        out = times(out, scale) if isinstance(scale, float) else op.mul(out, scale)
        return self.layout.enter(out)

    def post_norm(self, rows, name: str):
        """The norm of a block's output, where the architecture has one."""
        return self.norm(rows, name) if self.architecture.sandwich_norms else rows

    def add_blocks(self, layer: int, rows, normed, attended, feed_forward):
        """Residual rows plus attention's output plus `feed_forward` (of normed rows)."""
        if self.architecture.parallel_residual:
            return op.add(op.add(rows, attended), feed_forward(normed))
        rows = op.add(rows, attended)
        return op.add(rows, feed_forward(self.norm(rows, f"layers.{layer}.mlp_norm")))

    def mlp(self, layer: int, normed, correction: Correction | None = None):
        """The feed-forward block of normed rows [n, h] → [n, h]."""
        gated = self.architecture.gated_mlp
        inner = self.project(layer, "gate" if gated else "up", normed, correction)
        inner = activated(self.architecture.activation, inner)
        if gated:
            inner = op.mul(inner, self.project(layer, "up", normed, correction))
        out = self.project(layer, "down", inner, correction)
        return self.post_norm(out, f"layers.{layer}.mlp_post_norm")


def activated(activation: str, x):
    """The activation of a feed-forward block."""
    if activation.startswith("gelu"):
        return op.gelu(x, "EXACT" if activation == "gelu" else "TANH_APPROXIMATION")
    return op.silu(x) if activation == "silu" else op.relu(x)


def times(x, scale: float):
    """x · scale, in two terms where fp16 does not hold the scale."""
    if scale == 1.0:
        return x
    high = np.float16(scale)
    low = np.float16(scale - float(high))
    out = op.mul(x, high)
    return out if low == 0 else op.add(out, op.mul(x, low))


def gather_rotary(table: RotaryTable, positions):
    """fp16 [n, 4·rotated]: query cosine and sine, then key cosine and sine, at positions [n].

    The query half carries the queries' scale, so that no rounded scale constant is needed. The first
    half of each sine is negated: rotate(x) = x·cos + swap_halves(x)·sine.
    """
    if op.half_only:
        # What fp16 leaves of the table adds nothing there; with it the graph in float32 is exact.
        whole, left = (op.gather(half, indices=positions, axis=0) for half in table.in_halves())
        return op.add(whole, op.mul(left, np.float16(1 / REST_SCALE)))
    rows = op.gather(table.values, indices=positions, axis=0)
    cosine, sine = split(rows, [rows.shape[1] // 2] * 2, axis=1)
    negated = op.mul(sine, np.float32(-1))
    keys = op.concat([cosine, cosine, negated, sine], axis=1)
    both = op.concat([op.mul(keys, table.scale), keys], axis=1)
    return op.to_float(both)


def gather_tables(tables: dict, positions) -> dict:
    """Rotary rows of `tables.rotary_tables` at positions [n] by window; None stays None."""
    gathered = {id(t): gather_rotary(t, positions) for t in tables.values() if t is not None}
    return {window: gathered.get(id(table)) for window, table in tables.items()}


def split_rotary(rows) -> Rotary | None:
    """[n, 4·rotated] → the four parts."""
    return None if rows is None else Rotary(*split(rows, [rows.shape[1] // 4] * 4, axis=1))


def rotate(heads, cos, sin, scale: float = 1.0):
    """Rotary positions on the first features of [heads, n, head_dim]; the others are multiplied by `scale`.

    cos and sin [n, rotated], sine's first half negated; a scale is already in them.
    """
    rotated, width = cos.shape[-1], heads.shape[-1]
    half = rotated // 2
    rest = [] if rotated == width else [split(heads, [rotated, width - rotated], axis=2)[1]]
    first, second = split(heads, [half, half], axis=2)
    turned = heads if not rest else op.concat([first, second], axis=-1)
    swapped = op.concat([second, first], axis=-1)
    turned = op.add(op.mul(turned, cos), op.mul(swapped, sin))
    return turned if not rest else op.concat([turned, times(rest[0], scale)], axis=-1)
