"""An adapter as inputs of a Core ML function: its tensors stacked by layer, LoRA padded to one rank.

With `--lora inputs` all adapters of a package run through the same two functions, and the host passes
what differs between them. Names: the tensor's own with its layer left out, as `lora_q_a` [L, rank, in],
`stream_embeddings` [γ, h], `stream_lora_q_a` [N_s, r, in], `pruning_a` [r, h]; and `lora_scale` [1].
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ss_device.architecture import Architecture
from ss_device.config import SpeculativeConfig, tensor_shapes
from ss_device.lora_names import lora_shapes

SCALE = "lora_scale"
# The bigram bias stays with the host, which draws the trees.
ON_THE_HOST = "bigram."
LORA = "lora_"


def place_of(name: str) -> tuple[str, int | None]:
    """A tensor's input and its place there: `lora.layers.3.attn.q.a` → (`lora_q_a`, 3)."""
    parts = name.split(".")
    words = [p for p in parts if not p.isdigit() and p not in ("layers", "attn", "mlp")]
    numbers = [int(p) for p in parts if p.isdigit()]
    return "_".join(words), numbers[0] if numbers else None


def input_shapes(
    config: SpeculativeConfig, architecture: Architecture, rank: int, prunes: bool
) -> dict[str, tuple[int, ...]]:
    """Name → shape of the step function's adapter inputs (fp16); the prefill takes those of `LORA`.

    rank: of the padded LoRA; prunes: whether the step prunes, which takes the pruning head.
    """
    shapes: dict[str, tuple[int, ...]] = {SCALE: (1,)}
    for name, shape in _tensors(config, architecture, rank).items():
        if name.startswith(ON_THE_HOST) or (name.startswith("pruning.") and not prunes):
            continue
        place, index = place_of(name)
        # Layers come in order, so the last one's place tells how many there are.
        shapes[place] = shape if index is None else (index + 1, *shape)
    return shapes


def input_values(
    tensors: Mapping[str, np.ndarray],
    config: SpeculativeConfig,
    architecture: Architecture,
    rank: int,
    prunes: bool,
) -> dict[str, np.ndarray]:
    """fp16 arrays of `input_shapes` for one adapter.

    tensors: as a bundle stores them (`speculative.safetensors`, and LoRA by the names of `lora_names`);
    a projection without LoRA is left at zero, and so are the ranks that the adapter does not have.
    """
    shapes = input_shapes(config, architecture, rank, prunes)
    values = {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        place, index = place_of(name)
        if place in values:
            target = values[place] if index is None else values[place][index]
            target[tuple(slice(size) for size in tensor.shape)] = tensor
    values[SCALE][0] = config.lora_alpha / config.lora_rank
    return values


def for_prefill(values: Mapping[str, object]) -> dict:
    """Those that the prefill function takes: it carries no streams and prunes nothing."""
    return {name: value for name, value in values.items() if name.startswith(LORA)}


def _tensors(
    config: SpeculativeConfig, architecture: Architecture, rank: int
) -> dict[str, tuple[int, ...]]:
    """Shapes by tensor name, LoRA with the padded rank on every projection."""
    return tensor_shapes(config, architecture) | lora_shapes(architecture, rank)
