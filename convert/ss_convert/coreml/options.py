"""CoreMLOptions: the sizes a Core ML package is built for."""

from __future__ import annotations

from dataclasses import dataclass

from ss_device.architecture import Architecture
from ss_device.errors import UserError

PRUNE_OVER = ("draft", "vocabulary")


@dataclass(frozen=True)
class CoreMLOptions:
    """Sizes of the functions (METHOD: One decoding step).

    num_nodes N: rows of a step; num_kept K: nodes left after pruning (K = N: none); context C: cached
    positions; chunk: prompt tokens per prefill call; prune_over: early-exit scores normalised over the
    draft's own tokens (`draft`) or over V (`vocabulary`).
    """

    num_nodes: int = 32
    num_kept: int = 32
    context: int = 512
    chunk: int = 64
    prune_over: str = "draft"

    def __post_init__(self) -> None:
        for name in ("num_nodes", "num_kept", "context", "chunk"):
            if getattr(self, name) < 1:
                raise UserError(f"Core ML option {name} must be at least 1, not {getattr(self, name)}")
        if self.num_kept > self.num_nodes:
            raise UserError(f"num_kept {self.num_kept} exceeds num_nodes {self.num_nodes}")
        if self.num_nodes > 2048:
            # Node ids pass through fp16 matrix products, which hold integers exactly up to 2048.
            raise UserError(f"num_nodes {self.num_nodes} exceeds 2048")
        if self.prune_over not in PRUNE_OVER:
            raise UserError(f"prune_over '{self.prune_over}' is not one of {', '.join(PRUNE_OVER)}")

    def check(self, architecture: Architecture) -> None:
        """Raise UserError when the base model has fewer positions than `context`."""
        if self.context > architecture.max_positions:
            raise UserError(
                f"context {self.context} exceeds the base model's {architecture.max_positions} positions"
            )

    @property
    def prunes(self) -> bool:
        return self.num_kept < self.num_nodes
