"""The trainable parts that an adapter adds to a base model, named as in `config.tensor_shapes`."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from ss_device.architecture import Architecture
from ss_device.config import SpeculativeConfig


class LowRank(nn.Module):
    """x → up(down(x)) without activation; `up` starts at zero, so it starts as no change.

    down [rank, in], up [out, rank].
    """

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, inputs) / math.sqrt(inputs))
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.down.T @ self.up.T


class LoraFactors(nn.Module):
    """LoRA on the rows of streams only: scale · b @ (a @ x). a [rank, in], b [out, rank]."""

    def __init__(self, inputs: int, outputs: int, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.a = nn.Parameter(torch.randn(rank, inputs) / math.sqrt(inputs))
        self.b = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.a.T @ self.b.T * self.scale


class PruningHead(nn.Module):
    """M + b @ (a @ M), the early exit's residual adapter (docs/method.md, Training). b starts at zero."""

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, hidden) / math.sqrt(hidden))
        self.b = nn.Parameter(torch.zeros(hidden, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x @ self.a.T @ self.b.T


class BigramBiasFactors(nn.Module):
    """Low-rank bigram logits u[parent] @ v.T; v starts at zero. u, v: [V, rank]."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.randn(vocab_size, rank) / math.sqrt(rank))
        self.v = nn.Parameter(torch.zeros(vocab_size, rank))

    def forward(self, parents: torch.Tensor) -> torch.Tensor:
        """Parent token ids [...] → logits [..., V]."""
        return self.u[parents] @ self.v.T


class StreamParameters(nn.Module):
    """Everything in `speculative.safetensors`; `state_dict` names are the file's tensor names."""

    def __init__(self, config: SpeculativeConfig, architecture: Architecture) -> None:
        super().__init__()
        h = architecture.hidden_size
        if not config.value_rotation:
            self.stream_embeddings = nn.Parameter(0.02 * torch.randn(config.num_streams, h))
        if config.stream_init_rank:
            self.stream_init = LowRank(h, h, config.stream_init_rank)
        if config.stream_adapter_rank:
            self.stream_adapters = nn.ModuleList(
                LowRank(h, h, config.stream_adapter_rank) for _ in range(config.num_msa_layers)
            )
        if config.stream_lora_rank:
            self.stream_lora = nn.ModuleList(
                nn.ModuleDict(
                    {
                        name: LoraFactors(
                            inputs, outputs, config.stream_lora_rank, config.stream_lora_scale
                        )
                        for name, (outputs, inputs) in architecture.projection_shapes().items()
                    }
                )
                for _ in range(config.num_msa_layers)
            )
        if config.pruning_rank:
            self.pruning = PruningHead(h, config.pruning_rank)
        if config.bigram_rank:
            self.bigram = BigramBiasFactors(architecture.vocab_size, config.bigram_rank)

    def to_numpy(self) -> dict[str, np.ndarray]:
        """float32 arrays under the file's names."""
        return {n: t.detach().float().cpu().numpy() for n, t in self.state_dict().items()}

    def from_numpy(self, tensors: dict[str, np.ndarray]) -> None:
        """Copy arrays in; names and shapes must match exactly."""
        self.load_state_dict({n: torch.from_numpy(np.array(t)).float() for n, t in tensors.items()})
