"""Settings, models and trees that the MLX tests share."""

from __future__ import annotations

import numpy as np

from ss_device.adapter import Adapter
from ss_device.base_model import BaseFolder
from ss_device.config import SpeculativeConfig
from ss_device.tree import DraftTree, tree_from_parents
from ss_runtime.mlx.step_model import MLXStepModel
from ss_runtime.settings import RuntimeSettings

PROMPT = [1, 40, 41, 42, 40, 41, 97, 5, 200, 41, 42]

CONFIGS = {
    "paper": SpeculativeConfig(num_streams=3, num_msa_layers=2, stream_adapter_rank=4, pruning_rank=4),
    "rich": SpeculativeConfig(
        num_streams=2,
        num_msa_layers=3,
        stream_mlp="base",
        stream_position="same",
        stream_adapter_rank=4,
        stream_init_rank=3,
        stream_lora_rank=4,
        stream_lora_alpha=8.0,
        pruning_rank=4,
        bigram_rank=6,
    ),
    "bare": SpeculativeConfig(
        num_streams=2, num_msa_layers=1, stream_adapter_rank=0, pruning_rank=0, stream_mlp="adapter"
    ),
}
SHARED = {
    attends: SpeculativeConfig(
        mode="shared",
        num_streams=2,
        num_msa_layers=2,
        main_attends_streams=attends,
        stream_mlp="base",
        stream_adapter_rank=0,
        stream_lora_rank=4,
        stream_lora_alpha=4.0,
        pruning_rank=4,
        lora_rank=4,
        lora_alpha=8.0,
    )
    for attends in (False, True)
}


def adapter_arrays(adapter: Adapter) -> dict[str, np.ndarray]:
    """What a bundle's adapter file holds, without the file."""
    arrays = dict(adapter.tensors)
    for name, (a, b) in adapter.lora.items():
        arrays |= {f"lora.{name}.a": a, f"lora.{name}.b": b}
    return arrays


def mlx_model(base: BaseFolder, adapter: Adapter, **settings) -> MLXStepModel:
    settings = {"num_nodes": 8, "context": 128, "dtype": "float32", **settings}
    return MLXStepModel(
        base.architecture,
        adapter.config,
        base.weights(),
        adapter_arrays(adapter),
        RuntimeSettings(**settings),
    )


def random_tree(rng: np.random.Generator, num_nodes: int, root: int, vocab: int) -> DraftTree:
    """A random shape with random tokens, no two siblings alike."""
    parents = [-1] + [int(rng.integers(0, node)) for node in range(1, num_nodes)]
    tokens = [root, *rng.permutation(vocab)[: num_nodes - 1].tolist()]
    return tree_from_parents(tokens, parents)
