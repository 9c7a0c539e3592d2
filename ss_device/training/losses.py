"""Losses of streams, main stream and pruning head over a batch of prompt-completion documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ss_device.reference.stream_model import Rows, StreamModel
from ss_device.training.corpus import Document
from ss_device.training.schedule import LossWeights

IGNORE = -100


@dataclass(frozen=True)
class Batch:
    """Padded documents with the positions that carry streams.

    ids [B, T]; rows [B, P]: positions i with x[i+1] generated, T where padded; main_targets [B, P]:
    x[i+1]; targets, parents [B, P, γ]: x[i+1+j] and its parent token x[i+j]. -100 = no target.
    counts [1 + γ]: what the sums over main and stream targets are divided by, normally their numbers.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    main_targets: torch.Tensor
    targets: torch.Tensor
    parents: torch.Tensor
    counts: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def make_batch(documents: Sequence[Document], num_streams: int, pad_id: int = 0, width: int = 0) -> Batch:
    """Batch of `documents`; streams sit where the next token is generated (docs/method.md, Modes).

    Of a span [a, b) these are the positions a-1 … b-2, and no target lies outside the position's own
    span (docs/method.md, Training). T is the longest document's length, or `width` when that is larger.
    """
    width = max(width, *(len(d.ids) for d in documents))
    placed = [_stream_positions(d) for d in documents]
    count = max(len(positions) for positions, _ in placed)
    size = len(documents)
    ids = np.full((size, width), pad_id, np.int64)
    rows = np.full((size, count), width, np.int64)
    ends = np.zeros((size, count), np.int64)
    for index, (document, (positions, span_ends)) in enumerate(zip(documents, placed, strict=True)):
        ids[index, : len(document.ids)] = document.ids
        rows[index, : len(positions)] = positions
        ends[index, : len(positions)] = span_ends
    lines = np.arange(size)[:, None]
    reach = rows[..., None] + 1 + np.arange(num_streams + 1)
    inside = reach < ends[..., None]
    ahead = np.where(inside, ids[lines[..., None], np.minimum(reach, width - 1)], IGNORE)
    main, targets = ahead[..., 0], ahead[..., 1:]
    parents = np.where(targets == IGNORE, 0, ahead[..., :-1])
    counts = np.maximum(1, target_counts(documents, num_streams)).astype(np.float32)
    return Batch(*(torch.from_numpy(a) for a in (ids, rows, main, targets, parents, counts)))


def _stream_positions(document: Document) -> tuple[np.ndarray, np.ndarray]:
    """Positions i [P] with x[i+1] generated, and the end of the span that x[i+1] lies in [P]."""
    spans = [(max(first, 1), end) for first, end in document.generated]
    positions = [np.arange(first - 1, end - 1) for first, end in spans]
    ends = [np.full(len(p), end) for p, (_, end) in zip(positions, spans, strict=True)]
    return np.concatenate(positions), np.concatenate(ends)


def target_counts(documents: Sequence[Document], num_streams: int) -> np.ndarray:
    """Numbers of targets [1 + γ] of the main stream and of each stream in `documents`."""
    lengths = np.array([end - max(first, 1) for d in documents for first, end in d.generated])
    return np.maximum(0, lengths[:, None] - np.arange(num_streams + 1)).sum(0)


@dataclass(frozen=True)
class Outputs:
    """Logits at the rows that carry streams: streams [B, P, γ, V], main and early [B, P, V], or None."""

    streams: torch.Tensor | None
    main: torch.Tensor | None
    early: torch.Tensor | None


def forward(
    model: StreamModel,
    batch: Batch,
    main: bool,
    early: bool,
    streams: bool = True,
    checkpointing: bool = False,
    bias: bool = True,
) -> Outputs:
    """One pass over a batch. `main`, `early` and `streams` say which logits are wanted.

    `bias` adds the bias of the true parents to the streams', when the model has one.

    In lossless mode the main rows need no gradient: nothing trainable feeds them. `checkpointing`
    recomputes every layer in the backward pass instead of keeping what it computed.
    """
    length = batch.ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=batch.ids.device).tril()
    positions = torch.arange(length, device=batch.ids.device).expand_as(batch.ids)
    hidden = model.embed(batch.ids, positions)
    rows = Rows(hidden, positions, causal.expand(len(batch.ids), -1, -1))
    layer = recomputed(model.layer) if checkpointing else model.layer
    for index in range(model.first_msa_layer):
        rows, _ = layer(index, rows, None)
    early_logits = model.early_logits(at_rows(rows.main.detach(), batch.rows)) if early else None
    if not (streams or main):
        return Outputs(None, None, early_logits)
    rows = model.start_streams(rows, batch.rows)
    for index in range(model.first_msa_layer, model.architecture.num_layers):
        rows, _ = layer(index, rows, None)
    parents = batch.parents if bias else None
    stream_logits = stream_logits_of(model, rows, parents) if streams else None
    main_logits = model.logits(at_rows(rows.main, batch.rows)) if main else None
    return Outputs(stream_logits, main_logits, early_logits)


def recomputed(function: Callable) -> Callable:
    """`function` whose inner results are computed again in the backward pass (same gradients)."""
    return partial(checkpoint, function, use_reentrant=False)


def stream_logits_of(model: StreamModel, rows: Rows, parents: torch.Tensor | None) -> torch.Tensor:
    """Logits [B, P, γ, V] of the streams, with the bias of their true parents [B, P, γ] when given."""
    logits = model.logits(rows.streams)
    if parents is None or not model.config.bigram_rank:
        return logits
    return logits + model.parts.bigram(parents)


def at_rows(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """hidden [B, T, h] at positions [B, P] → [B, P, h]; zeros where a position is T (padding)."""
    padded = functional.pad(hidden, (0, 0, 0, 1))
    return torch.take_along_dim(padded, rows[..., None], dim=1)


def weighted_loss(
    out: Outputs, batch: Batch, weights: LossWeights
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Σ α0·CE(main) + Σ_j αj·mean loss of stream j + CE(early exit) (docs/method.md, Training).

    A stream's loss is its cross-entropy, or with `weights.target` kl its `stream_divergence`. Returns
    the loss and its detached parts: `stream_1` … `stream_γ`, `main`, `early`, as computed.
    """
    parts: dict[str, torch.Tensor] = {}
    loss: torch.Tensor | float = 0.0
    if out.streams is not None:
        for j, weight in enumerate(weights.streams):
            part = _stream_loss(out, batch, j, weights.target)
            parts[f"stream_{j + 1}"] = part
            loss = loss + weight * part
    if out.main is not None and weights.main:
        parts["main"] = _cross_entropy(out.main, batch.main_targets, batch.counts[0])
        loss = loss + weights.main * parts["main"]
    if out.early is not None:
        parts["early"] = _cross_entropy(out.early, batch.main_targets, batch.counts[0])
        loss = loss + weights.early * parts["early"]
    return loss, {name: value.detach() for name, value in parts.items()}


def _stream_loss(out: Outputs, batch: Batch, j: int, target: str) -> torch.Tensor:
    logits, wanted, count = out.streams[:, :, j], batch.targets[..., j], batch.counts[1 + j]
    if target == "kl":
        return stream_divergence(logits, out.main, wanted, j + 1, count)
    return _cross_entropy(logits, wanted, count)


def stream_divergence(
    streams: torch.Tensor, main: torch.Tensor, targets: torch.Tensor, ahead: int, count: torch.Tensor
) -> torch.Tensor:
    """KL(main ‖ stream) summed over targets / count, where both predict the token x[i+1+ahead].

    streams [B, P, V]: stream `ahead` at the rows; main [B, P, V]: main logits at the same rows, which
    are consecutive inside a span, so the teacher of row p is row p + ahead; targets [B, P], -100 = no
    target (the teacher would lie outside the span). The teacher gets no gradient. In lossless mode
    main is the base itself, in shared mode the model being fine-tuned.
    """
    valid, rows = targets != IGNORE, streams.shape[1]
    index = (torch.arange(rows, device=main.device) + ahead).clamp(max=rows - 1)
    teacher = main.detach()[:, index][valid].float().log_softmax(-1)
    student = streams[valid].float().log_softmax(-1)
    return functional.kl_div(student, teacher, log_target=True, reduction="sum") / count


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    flat = logits.flatten(0, -2).float()
    total = functional.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return total / count
