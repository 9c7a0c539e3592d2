"""A decoder with streams on `mlx.nn` modules, built from an Architecture and canonical arrays."""

from __future__ import annotations

from types import MappingProxyType

import mlx.core as mx
import mlx.nn as nn

from ss_device.architecture import Architecture, block_of
from ss_device.base_model import check_shapes
from ss_device.bundle import BIGRAM_BIAS
from ss_device.config import SpeculativeConfig, tensor_shapes
from ss_device.errors import UserError
from ss_device.lora_names import lora_shapes, parse_lora_name
from ss_device.old_names import TENSORS, renamed
from ss_device.packed_weights import packings
from ss_device.rotary import attention_factor, inverse_frequencies
from ss_runtime.mlx.kv_cache import Layers
from ss_runtime.mlx.layers import (
    DecoderLayer,
    LowRank,
    Rows,
    View,
    make_norm,
    rotary_tables,
    soft_cap,
)
from ss_runtime.mlx.quantized_weights import make_room, quantized_names
from ss_runtime.mlx.tree_graph import TreeArrays, slot_positions

MERGE_UP_TO = 1 << 20


class StreamDecoder(nn.Module):
    """Base model and adapter as one module. Module paths follow the canonical base names.

    context in tokens decides LongRoPE's factors (`ss_device.rotary`).
    """

    def __init__(self, architecture: Architecture, config: SpeculativeConfig, context: int):
        super().__init__()
        h, vocab = architecture.hidden_size, architecture.vocab_size
        self.architecture, self.config = architecture, config
        self.first_msa_layer = architecture.num_layers - config.num_msa_layers
        self.embed = nn.Embedding(vocab, h)
        if architecture.positions == "learned":
            self.positions = nn.Embedding(architecture.max_positions + architecture.position_offset, h)
        self.layers = [
            DecoderLayer(architecture, config, layer >= self.first_msa_layer, architecture.window(layer))
            for layer in range(architecture.num_layers)
        ]
        self.norm = make_norm(architecture)
        if not architecture.tied_head:
            self.head = nn.Embedding(vocab, h)  # so that single rows can be looked up, quantized too
        if architecture.head_bias:
            self.head_bias = mx.zeros((vocab,))
        if not config.value_rotation:
            self.stream_embeddings = mx.zeros((config.num_streams, h))
        if rank := config.stream_init_rank:
            self.stream_init = LowRank(h, h, rank)
        if rank := config.pruning_rank:
            self.pruning = LowRank(h, h, rank)
        self._rotary = _rotary(architecture, context)

    @property
    def output(self) -> nn.Embedding:
        """The LM head as an embedding table [V, h]."""
        return self["embed"] if self.architecture.tied_head else self["head"]

    def embed_rows(self, tokens: mx.array, positions: mx.array) -> mx.array:
        """Token ids and positions [R] → [R, h], scaled and with learned positions where there are some."""
        x = self.embed(tokens)
        if (scale := self.architecture.embedding_scale) != 1.0:
            x = x * mx.array(scale, x.dtype)
        return x + self.learned(positions) if "positions" in self else x

    def learned(self, positions: mx.array) -> mx.array:
        """Learned positions [R] → [R, h]; beyond the table's end its last row."""
        a = self.architecture
        return self.positions(mx.minimum(positions, a.max_positions - 1) + a.position_offset)

    def logits(self, x: mx.array) -> mx.array:
        """Final norm and head: [R, h] → [R, V] in the model's dtype."""
        return self.head_logits(self.norm(x))

    def head_logits(self, normed: mx.array, tokens: mx.array | None = None) -> mx.array:
        """The head on normed rows [R, h] → [R, V], or its columns of `tokens` [N] alone → [R, N]."""
        out = self.output.as_linear(normed) if tokens is None else normed @ self.output(tokens).T
        if "head_bias" in self:
            out = out + (self["head_bias"] if tokens is None else self["head_bias"][tokens])
        return soft_cap(out, self.architecture.logit_softcap)

    def start_streams(self, main: mx.array, positions: mx.array) -> mx.array:
        """S[i, j] = f(M[i]) + P[j]: main rows [R, h] → [R·γ, h], position-major (docs/method.md, Streams).

        Without P when values are rotated instead (v1 App. B).
        positions [R] of the main rows; learned ones are exchanged for those of the streams.
        """
        start = main + self["stream_init"](main) if "stream_init" in self else main
        streams = mx.repeat(start[:, None, :], self.config.num_streams, axis=1)
        if "stream_embeddings" in self:
            streams = streams + self.stream_embeddings[None]
        if "positions" in self:
            there = self.learned(self.stream_positions(positions)).reshape(streams.shape)
            streams = streams + there - self.learned(positions)[:, None, :]
        return streams.reshape(-1, main.shape[-1])

    def stream_positions(self, positions: mx.array) -> mx.array:
        """Positions [R] of main rows → [R·γ] of their streams."""
        ahead = mx.arange(1, self.config.num_streams + 1)
        if self.config.stream_position == "same":
            ahead = mx.zeros_like(ahead)
        return (positions[:, None] + ahead[None, :]).reshape(-1)

    def rows(
        self,
        positions: mx.array,
        num_main: int,
        mask: mx.array,
        slot: mx.array,
        anchors: mx.array | None = None,
        keys: mx.array | None = None,
    ) -> Rows:
        """Describe the rows of one pass; positions [R], mask bool [R, C], slot [1].

        For layers with a window: anchors [R], the positions that count (of a stream: its main row's; by
        default `positions`); keys [C], those of what stands in the key buffer (by default the committed
        text, then these rows).
        """
        anchors = positions if anchors is None else anchors
        views = {}
        for window, (frequencies, factor) in self._rotary.items():
            seen = mask
            if window is not None:
                keys = slot_positions(anchors, slot, mask.shape[1]) if keys is None else keys
                seen = mask & (anchors[:, None] - keys[None, :] < window)
            tables = (None, None) if frequencies is None else rotary_tables(positions, frequencies, factor)
            views[window] = View(seen, *tables)
        return Rows(num_main, slot, views)

    def run_layers(self, x: mx.array, first: int, last: int, rows: Rows, kv: Layers) -> mx.array:
        """Rows [R, h] through layers first..last-1. Replaces those layers' entries of the list `kv`."""
        for index in range(first, last):
            x, kv[index] = self.layers[index](x, rows, kv[index])
        return x

    def early_exit_edges(self, hidden: mx.array, tree: TreeArrays, over: str) -> mx.array:
        """Early-exit log-probability of every node given its parent, float32 [N] (docs/method.md, Pruning).

        hidden [N, h]: main rows at the first MSA layer. over: `draft` normalises over the tokens of the
        tree's nodes but the root, `vocabulary` over all V.
        """
        nodes = mx.arange(tree.size)
        exits = self.norm(hidden + self["pruning"](hidden) if "pruning" in self else hidden)
        if over == "vocabulary":
            logits = self.head_logits(exits).astype(mx.float32)
            scores = logits[:, tree.tokens]
            scores = scores - mx.logsumexp(logits, axis=1, keepdims=True)
        else:
            scores = self.head_logits(exits, tree.tokens).astype(mx.float32)
            drafted = (nodes > 0) & (nodes < tree.num_real)
            scores = mx.where(drafted[None, :], scores, -mx.inf)
            scores = scores - mx.logsumexp(scores, axis=1, keepdims=True)
        return scores[mx.maximum(tree.parents, 0), nodes]

    def install(self, base: dict, adapter: dict, dtype: mx.Dtype) -> None:
        """Set every weight, cast to `dtype`, from canonical arrays (numpy or MLX).

        base: `Architecture.weight_shapes` names, a quantized `.weight` with `.scales` and `.biases` beside
        it; adapter: `adapter_shapes` names. Raises UserError for a missing, unexpected or misshapen tensor.
        """
        shapes = self.architecture.weight_shapes()
        quantized = packings(base, shapes)
        packed = quantized_names(quantized)
        check_shapes(
            {n: a for n, a in base.items() if n not in packed},
            {n: s for n, s in shapes.items() if n not in packed},
            "base model",
        )
        make_room(self, quantized)
        adapter = {n: a for n, a in renamed(adapter, TENSORS).items() if n not in BIGRAM_BIAS}
        check_shapes(adapter, adapter_shapes(self.config, self.architecture), "adapter")
        named = {module_of(name): self._gain(name, array) for name, array in base.items()}
        for name, array in adapter.items():
            named[module_path(name, self.first_msa_layer)] = array
        weights = {name: as_weight(array, dtype) for name, array in named.items()}
        for name, weight in weights.items():
            if weight.dtype != dtype and name not in packed:
                raise UserError(f"tensor '{name}' is stored as {weight.dtype}, expected floating point")
        self.load_weights(list(weights.items()))

    def merge_stream_lora(self) -> None:
        """Give streams matrices of their own where these are so small that their number of products is
        what costs (MERGE_UP_TO weights each)."""
        for layer in self.layers[self.first_msa_layer :]:
            layer.attn.merge_stream_lora(MERGE_UP_TO)
            layer.mlp.merge_stream_lora(MERGE_UP_TO)

    @property
    def merged_bytes(self) -> int:
        """Memory of the streams' own matrices, beside the parameters."""
        return sum(block.merged_bytes for layer in self.layers for block in (layer.attn, layer.mlp))

    def _gain(self, name: str, array):
        """A norm's gain with `norm_offset`, in float32; other weights as they are."""
        offset = self.architecture.norm_offset
        is_gain = offset and name.endswith("norm.weight")
        return mx.array(array).astype(mx.float32) + offset if is_gain else array


def _rotary(architecture: Architecture, context: int) -> MappingProxyType:
    """By window: frequencies (None with learned positions) and the factor of cosines and sines.

    A mapping that a module does not take for parameters.
    """
    tables = dict.fromkeys(architecture.distinct_windows, (None, 1.0))
    if architecture.rotated:
        for window in tables:
            frequencies = mx.array(inverse_frequencies(architecture, window, context))
            tables[window] = frequencies, attention_factor(architecture, window)
    return MappingProxyType(tables)


def module_of(name: str) -> str:
    """Where a base weight lives in StreamDecoder: its canonical name, but for the head's bias."""
    return "head_bias" if name == "head.bias" else name


def adapter_shapes(config: SpeculativeConfig, architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what a decoder takes of an adapter: speculative tensors, shared mode's LoRA.

    The bigram bias is the host's: a bundle may keep it in a file of its own.
    """
    shapes = {n: s for n, s in tensor_shapes(config, architecture).items() if n not in BIGRAM_BIAS}
    return shapes | (lora_shapes(architecture, config.lora_rank) if config.lora_rank else {})


def module_path(name: str, first_msa_layer: int) -> str:
    """Where an adapter tensor (`adapter_shapes`) lives in StreamDecoder."""
    if lora := parse_lora_name(name):
        block, _, target = lora[0].rpartition(".")
        return f"{block}.lora.{target}.{lora[1]}"
    kind, *rest = name.split(".")
    if kind == "stream_lora":
        layer, target, factor = rest
        return f"layers.{first_msa_layer + int(layer)}.{block_of(target)}.stream_lora.{target}.{factor}"
    factors = {"down": "a", "up": "b"}
    if kind == "stream_adapters":
        return f"layers.{first_msa_layer + int(rest[0])}.mlp.stream_adapter.{factors[rest[1]]}"
    if kind == "stream_init":
        return f"stream_init.{factors[rest[0]]}"
    return name


def as_weight(array, dtype: mx.Dtype) -> mx.array:
    """A numpy or MLX array in `dtype`, packed codes and their byte scales as they are.

    An MLX array that has the type already is shared, not copied.
    """
    array = array if isinstance(array, mx.array) else mx.array(array)
    return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array
