"""GraphOptions: the sizes a Core ML package is built for and the choices of its graph."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ss_convert.graph.weight_format import WEIGHT_FORMATS
from ss_device.adapter import Adapter
from ss_device.architecture import Architecture
from ss_device.config import PRUNE_OVER
from ss_device.errors import UserError

# `inputs`: Apple's pattern for the Neural Engine in Core AI.
CACHES = ("state", "inputs")
# What `fused` is in Core AI: there the scale stays in the queries.
COMPOSITE = "composite"
CHOICES = {
    "prune_over": PRUNE_OVER,
    "weights": WEIGHT_FORMATS,
    "embedding_weights": WEIGHT_FORMATS,
    "layout": ("linear", "conv"),
    "attention": ("explicit", "fused", "by-head"),
    "commit": ("one-hot", "gather"),
    "cache": CACHES,
    "lora": ("baked", "inputs"),
    "preset": ("none", "ane", "gpu"),
}
# What a package says of its graph beside sizes and weights.
GRAPH_CHOICES = ("preset", "layout", "attention", "head_split", "commit", "pad_state")
# Choices that suit an engine (docs/platform.md, Neural Engine); the defaults of GraphOptions suit both.
PRESETS = {
    "ane": {
        "layout": "conv",
        "attention": "explicit",
        "head_split": 16384,
        "commit": "one-hot",
        "pad_state": True,
    },
    "gpu": {
        "layout": "linear",
        "attention": "fused",
        "head_split": 0,
        "commit": "gather",
        "pad_state": False,
    },
}


@dataclass(frozen=True)
class GraphOptions:
    """Sizes of the functions (docs/method.md, One decoding step) and how they are built.

    num_nodes N: rows of a step; num_kept K: nodes left after pruning (K = N: none); context C: cached
    positions; chunk: prompt tokens per prefill call; prune_over: early-exit scores normalised over the
    draft's own tokens (`draft`) or over V (`vocabulary`); weights, embedding_weights: how the base's
    projections and its embedding and head are stored (`compression.py`); sampling: the step also
    returns its logits and the streams of every kept node.

    layout: products as `linear` or as 1×1 `conv` (`layout.py`); attention (`attention.py`); head_split:
    most outputs of one product of the head, 0 for no limit (a tied head's parts are then stored beside the
    embedding); commit: accepted rows moved by a product or a gather; pad_state: the state's last
    dimension rounded up to a multiple of 32; cache: keys and values as a `state` that functions change, or
    as `inputs`, new rows being outputs that the host writes (Core AI alone, `cache.py`); cuts: first layers
    of all parts but the first (`parts.py`).

    lora: an adapter's tensors as constants of its own functions (`baked`), or as `inputs` of functions that
    all adapters of the package share, LoRA padded to lora_rank (`ss_device/adapter_inputs.py`); preset:
    which of `PRESETS` the choices began with, for the record alone.
    """

    num_nodes: int = 32
    num_kept: int = 32
    context: int = 512
    chunk: int = 64
    prune_over: str = "draft"
    weights: str = "fp16"
    embedding_weights: str = "fp16"
    sampling: bool = False
    layout: str = "linear"
    attention: str = "explicit"
    head_split: int = 0
    commit: str = "one-hot"
    pad_state: bool = False
    cuts: tuple[int, ...] = ()
    cache: str = "state"
    lora: str = "baked"
    lora_rank: int = 0
    preset: str = "none"

    def __post_init__(self) -> None:
        for name in ("num_nodes", "num_kept", "context", "chunk"):
            if getattr(self, name) < 1:
                raise UserError(f"Core ML option {name} must be at least 1, not {getattr(self, name)}")
        if self.head_split < 0:
            raise UserError(f"head_split {self.head_split} must not be negative")
        if self.lora == "inputs" and (self.cuts or self.lora_rank < 1):
            raise UserError("adapters as inputs need a rank, and a decoder in one part")
        if self.num_kept > self.num_nodes:
            raise UserError(f"num_kept {self.num_kept} exceeds num_nodes {self.num_nodes}")
        if self.num_nodes > 2048:
            # Node ids pass through fp16 matrix products, which hold integers exactly up to 2048.
            raise UserError(f"num_nodes {self.num_nodes} exceeds 2048")
        for name, known in CHOICES.items():
            known = (*known, COMPOSITE) if name == "attention" else known
            if getattr(self, name) not in known:
                raise UserError(f"{name} '{getattr(self, name)}' is not one of {', '.join(known)}")

    def check(self, architecture: Architecture) -> None:
        """Raise UserError when the base model has fewer positions than `context` or layers than `cuts`."""
        edges = (0, *self.cuts, architecture.num_layers)
        if any(a >= b for a, b in zip(edges, edges[1:], strict=False)):
            cuts = ", ".join(map(str, self.cuts))
            raise UserError(f"cuts {cuts} must ascend between layers 1 and {architecture.num_layers - 1}")
        if self.context > architecture.max_positions:
            raise UserError(
                f"context {self.context} exceeds the base model's {architecture.max_positions} positions"
            )

    @property
    def prunes(self) -> bool:
        return self.num_kept < self.num_nodes

    @property
    def compresses(self) -> bool:
        return (self.weights, self.embedding_weights) != ("fp16", "fp16")

    def graph(self) -> dict:
        """The graph's choices by option name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name in GRAPH_CHOICES}


def check_adapter(adapter: Adapter) -> None:
    """Raise UserError for a setting of the streams that Core ML graphs do not have."""
    if count := adapter.config.stream_top_keys:
        raise UserError(
            f"adapter '{adapter.app}': its streams see {count} keys (stream_top_keys), which Core ML "
            f"packages do not take (a top-k by head and layer leaves the Neural Engine); use --target mlx"
        )
