"""Losses of streams, main stream and pruning head over a batch of prompt-completion documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ss_device.reference.stream_model import Rows, StreamModel
from ss_device.training.corpus import Document

IGNORE = -100


@dataclass(frozen=True)
class Batch:
    """Padded documents with the positions that carry streams.

    ids [B, T]; rows [B, P]: positions i with x[i+1] generated, T where padded; main_targets [B, P]:
    x[i+1]; targets, parents [B, P, γ]: x[i+1+j] and its parent token x[i+j]. -100 = no target.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    main_targets: torch.Tensor
    targets: torch.Tensor
    parents: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def make_batch(documents: Sequence[Document], num_streams: int, pad_id: int = 0) -> Batch:
    """Batch of `documents`; streams sit where the next token is generated (METHOD: Modes)."""
    width = max(len(d.ids) for d in documents)
    count = max(len(d.ids) - d.prompt_length for d in documents)
    size = len(documents)
    ids = np.full((size, width + num_streams + 1), IGNORE, np.int64)
    rows = np.full((size, count), width, np.int64)
    for index, document in enumerate(documents):
        ids[index, : len(document.ids)] = document.ids
        positions = np.arange(document.prompt_length - 1, len(document.ids) - 1)
        rows[index, : len(positions)] = positions
    ahead = np.arange(1, num_streams + 1)
    reach = np.minimum(rows[..., None] + 1 + ahead, ids.shape[1] - 1)
    padded = (rows == width)[..., None]
    lines = np.arange(size)[:, None]
    targets = np.where(padded, IGNORE, ids[lines[..., None], reach])
    parents = np.where(targets == IGNORE, 0, ids[lines[..., None], reach - 1])
    main = np.where(padded[..., 0], IGNORE, ids[lines, np.minimum(rows + 1, ids.shape[1] - 1)])
    tokens = np.where(ids[:, :width] == IGNORE, pad_id, ids[:, :width])
    return Batch(*(torch.from_numpy(a) for a in (tokens, rows, main, targets, parents)))


@dataclass(frozen=True)
class Outputs:
    """Logits at the rows that carry streams: streams [B, P, γ, V], main and early [B, P, V] or None."""

    streams: torch.Tensor
    main: torch.Tensor | None
    early: torch.Tensor | None


def forward(model: StreamModel, batch: Batch, main: bool, early: bool) -> Outputs:
    """One pass over a batch. `main` and `early` say which extra logits are wanted.

    In lossless mode the main rows need no gradient: nothing trainable feeds them.
    """
    length = batch.ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=batch.ids.device).tril()
    positions = torch.arange(length, device=batch.ids.device).expand_as(batch.ids)
    hidden = model.embed(batch.ids)
    rows = Rows(hidden, positions, causal.expand(len(batch.ids), -1, -1))
    for index in range(model.first_msa_layer):
        rows, _ = model.layer(index, rows, None)
    early_logits = model.early_logits(_at_rows(rows.main.detach(), batch.rows)) if early else None
    rows = model.start_streams(rows, batch.rows)
    for index in range(model.first_msa_layer, model.architecture.num_layers):
        rows, _ = model.layer(index, rows, None)
    streams = model.logits(rows.streams)
    if model.config.markov_rank:
        streams = streams + model.parts.markov(batch.parents)
    main_logits = model.logits(_at_rows(rows.main, batch.rows)) if main else None
    return Outputs(streams, main_logits, early_logits)


def _at_rows(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    padded = functional.pad(hidden, (0, 0, 0, 1))
    return torch.take_along_dim(padded, rows[..., None], dim=1)


class StreamLoss(nn.Module):
    """The training objective as a module, so that DDP and FSDP see every forward pass."""

    def __init__(self, model: StreamModel) -> None:
        super().__init__()
        self.model = model
        # METHOD, Modes: α0 = 0, αj = 1 in lossless mode; α0 = 1, αj = 0.1 in shared mode.
        self.weights = (1.0, 0.1) if model.config.mode == "shared" else (0.0, 1.0)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return losses(self.model, batch, *self.weights)


def losses(
    model: StreamModel, batch: Batch, main_weight: float, stream_weight: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Σ α0·CE(main) + Σ_j αj·mean CE(stream j) + CE(early exit) (METHOD: Training).

    Returns the loss and its detached parts: `main`, `stream_1` … `stream_γ`, `early`.
    """
    wants_early = bool(model.config.pruning_rank)
    out = forward(model, batch, main=main_weight > 0, early=wants_early)
    parts: dict[str, torch.Tensor] = {}
    for j in range(model.config.num_streams):
        parts[f"stream_{j + 1}"] = _cross_entropy(out.streams[:, :, j], batch.targets[..., j])
    loss = stream_weight * sum(parts.values())
    if main_weight > 0:
        parts["main"] = _cross_entropy(out.main, batch.main_targets)
        loss = loss + main_weight * parts["main"]
    if wants_early:
        parts["early"] = _cross_entropy(out.early, batch.main_targets)
        loss = loss + parts["early"]
    return loss, {name: value.detach() for name, value in parts.items()}


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    valid = (targets != IGNORE).sum().clamp(min=1)
    flat = logits.flatten(0, -2).float()
    total = functional.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return total / valid


@torch.no_grad()
def rank_statistics(model: StreamModel, batches: Sequence[Batch], depth: int = 10) -> dict:
    """Which rank was right at each depth, teacher-forced: counts [γ, depth + 1], the last = beyond.

    Used to choose trees: `top1` is the share of targets each stream puts first.
    """
    gamma = model.config.num_streams
    counts = torch.zeros(gamma, depth + 1, dtype=torch.long)
    for batch in batches:
        logits = forward(model, batch, main=False, early=False).streams
        wanted = batch.targets.clamp(min=0)[..., None]
        ranks = (logits > logits.gather(-1, wanted)).sum(-1).clamp(max=depth)
        for j in range(gamma):
            valid = ranks[..., j][batch.targets[..., j] != IGNORE].cpu()
            counts[j] += torch.bincount(valid, minlength=depth + 1)
    totals = counts.sum(-1).clamp(min=1)
    return {
        "counts": counts.tolist(),
        "top1": [round(float(c[0] / t), 4) for c, t in zip(counts, totals, strict=True)],
    }
