"""A decoder with streams on `mlx.nn` modules, built from an Architecture and canonical arrays."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ss_device.architecture import Architecture
from ss_device.base_model import check_shapes
from ss_device.config import LORA_TARGETS, SpeculativeConfig, tensor_shapes
from ss_device.errors import UserError
from ss_runtime.kv_cache import Layers
from ss_runtime.stream_layers import ATTENTION, DecoderLayer, LowRank, Rows, rotary_tables
from ss_runtime.tree_graph import TreeArrays

FAMILIES = ("llama",)


class StreamDecoder(nn.Module):
    """Base model and adapter as one module. Module paths follow the canonical base names."""

    def __init__(self, architecture: Architecture, config: SpeculativeConfig):
        super().__init__()
        h, vocab = architecture.hidden_size, architecture.vocab_size
        self.architecture, self.config = architecture, config
        self.first_msa = architecture.num_layers - config.num_msa_layers
        self.embed = nn.Embedding(vocab, h)
        self.layers = [
            DecoderLayer(architecture, config, layer >= self.first_msa)
            for layer in range(architecture.num_layers)
        ]
        self.norm = nn.RMSNorm(h, architecture.norm_eps)
        if not architecture.tied_head:
            self.head = nn.Embedding(vocab, h)  # so that single rows can be looked up, quantized too
        self.stream_embeddings = mx.zeros((config.num_streams, h))
        if rank := config.stream_init_rank:
            self.stream_init = LowRank(h, h, rank)
        if rank := config.pruning_rank:
            self.pruning = LowRank(h, h, rank)

    @property
    def output(self) -> nn.Embedding:
        """The LM head as an embedding table [V, h]."""
        return self["embed"] if self.architecture.tied_head else self["head"]

    def logits(self, x: mx.array) -> mx.array:
        """Final norm and head: [R, h] → [R, V] in the model's dtype."""
        return self.output.as_linear(self.norm(x))

    def start_streams(self, main: mx.array) -> mx.array:
        """S[i, j] = f(M[i]) + P[j]: main rows [R, h] → [R·γ, h], position-major (METHOD: Streams)."""
        start = main + self["stream_init"](main) if "stream_init" in self else main
        streams = start[:, None, :] + self.stream_embeddings[None]
        return streams.reshape(-1, main.shape[-1])

    def stream_positions(self, positions: mx.array) -> mx.array:
        """Positions [R] of main rows → [R·γ] of their streams."""
        ahead = mx.arange(1, self.config.num_streams + 1)
        if self.config.stream_position == "same":
            ahead = mx.zeros_like(ahead)
        return (positions[:, None] + ahead[None, :]).reshape(-1)

    def rows(self, positions: mx.array, num_main: int, mask: mx.array, slot: mx.array) -> Rows:
        """Describe the rows of one pass; positions [R], mask bool [R, C], slot [1]."""
        tables = rotary_tables(positions, self.architecture.head_dim, self.architecture.rope_theta)
        return Rows(num_main, *tables, mask, slot)

    def run_layers(self, x: mx.array, first: int, last: int, rows: Rows, kv: Layers) -> mx.array:
        """Rows [R, h] through layers first..last-1. Replaces those layers' entries of the list `kv`."""
        for index in range(first, last):
            x, kv[index] = self.layers[index](x, rows, kv[index])
        return x

    def early_exit_edges(self, hidden: mx.array, tree: TreeArrays, over: str) -> mx.array:
        """Early-exit log-probability of every node given its parent, float32 [N] (METHOD: step, 2).

        hidden [N, h]: main rows at the first MSA layer. over: `draft` normalises over the tokens of the
        tree's nodes but the root, `vocabulary` over all V.
        """
        nodes = mx.arange(tree.size)
        exits = self.norm(hidden + self["pruning"](hidden) if "pruning" in self else hidden)
        if over == "vocabulary":
            logits = self.output.as_linear(exits).astype(mx.float32)
            scores = logits[:, tree.tokens]
            scores = scores - mx.logsumexp(logits, axis=1, keepdims=True)
        else:
            scores = (exits @ self.output(tree.tokens).T).astype(mx.float32)
            drafted = (nodes > 0) & (nodes < tree.num_real)
            scores = mx.where(drafted[None, :], scores, -mx.inf)
            scores = scores - mx.logsumexp(scores, axis=1, keepdims=True)
        return scores[mx.maximum(tree.parents, 0), nodes]

    def install(self, base: dict, adapter: dict, dtype: mx.Dtype) -> None:
        """Set every weight, cast to `dtype`, from canonical arrays (numpy or MLX).

        base: `Architecture.weight_shapes` names; adapter: `adapter_shapes` names. Raises UserError for a
        missing, unexpected or misshapen tensor.
        """
        check_shapes(base, self.architecture.weight_shapes(), "base model")
        check_shapes(adapter, adapter_shapes(self.config, self.architecture), "adapter")
        if self.architecture.family not in FAMILIES:
            raise UserError(f"model family '{self.architecture.family}' has no MLX decoder yet")
        named = dict(base)
        for name, array in adapter.items():
            if path := module_path(name, self.first_msa):
                named[path] = array
        self.load_weights([(name, mx.array(array).astype(dtype)) for name, array in named.items()])


def adapter_shapes(config: SpeculativeConfig, architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a bundle's adapter file: speculative tensors, then shared mode's LoRA."""
    shapes = tensor_shapes(config, architecture)
    if rank := config.lora_rank:
        for layer in range(architecture.num_layers):
            for target, (outputs, inputs) in architecture.projection_shapes().items():
                prefix = f"lora.layers.{layer}.{_block(target)}.{target}"
                shapes |= {f"{prefix}.a": (rank, inputs), f"{prefix}.b": (outputs, rank)}
    return shapes


def module_path(name: str, first_msa: int) -> str | None:
    """Where an adapter tensor lives in StreamDecoder; None for what the host uses (the parent bias)."""
    kind, *rest = name.split(".")
    if kind == "markov":
        return None
    if kind == "lora":
        _, layer, block, target, factor = rest
        return f"layers.{layer}.{block}.lora.{target}.{factor}"
    if kind == "stream_lora":
        layer, target, factor = rest
        return f"layers.{first_msa + int(layer)}.{_block(target)}.stream_lora.{target}.{factor}"
    factors = {"down": "a", "up": "b"}
    if kind == "stream_adapters":
        return f"layers.{first_msa + int(rest[0])}.mlp.stream_adapter.{factors[rest[1]]}"
    if kind == "stream_init":
        return f"stream_init.{factors[rest[0]]}"
    return name


def _block(target: str) -> str:
    assert target in LORA_TARGETS
    return "attn" if target in ATTENTION else "mlp"
