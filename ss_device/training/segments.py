"""Segment attention (v2 App. I): only one segment's streams are in memory at a time, gradients exact.

A segment is a run of consecutive positions. Its main rows see the earlier segments through their keys
and values, exactly as a decoding step sees the cache; its streams live only while it is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ss_device.reference.stream_model import KeysValues, Rows, StreamModel
from ss_device.training.corpus import Document
from ss_device.training.losses import (
    IGNORE,
    Batch,
    Outputs,
    at_rows,
    recomputed,
    stream_logits_of,
    weighted_loss,
)
from ss_device.training.schedule import LossWeights

Caches = list[KeysValues | None]


@dataclass(frozen=True)
class Segment:
    """Positions first … first + c - 1 of a batch.

    batch: ids [B, c], rows [B, P'] counted from `first` (c where padded) and their targets; `counts`
    are the whole batch's, so that the segments' losses add up to the batch's.
    carries: whether any document has streams here. last: no later segment carries any. length: the
    whole batch's T.
    """

    batch: Batch
    first: int
    length: int
    carries: bool
    last: bool


def stream_spans(documents: Sequence[Document], size: int) -> list[bool]:
    """For each segment of `size` positions whether a document has streams there, up to the last."""
    width = max(len(d.ids) for d in documents)
    spans = [False] * (-(-width // size))
    for document in documents:
        for start, end in document.generated:
            for index in range(max(start - 1, 0) // size, (end - 2) // size + 1):
                spans[index] = True
    while spans and not spans[-1]:
        spans.pop()
    return spans


def split(batch: Batch, size: int, spans: Sequence[bool]) -> Iterator[Segment]:
    """The segments of a batch. `spans` comes from `stream_spans` of all processes' documents."""
    for index, carries in enumerate(spans):
        first, after = index * size, min((index + 1) * size, batch.ids.shape[1])
        part = _positions(batch, first, after)
        yield Segment(part, first, batch.ids.shape[1], carries, index == len(spans) - 1)


def _positions(batch: Batch, first: int, after: int) -> Batch:
    """The part of `batch` at positions first … after - 1."""
    inside = (batch.rows >= first) & (batch.rows < after)
    numbers = inside.sum(1, keepdim=True)
    # A document's rows ascend, so those inside are a run that starts at the first of them.
    offsets = torch.arange(max(1, int(numbers.max())), device=batch.rows.device)
    index = (inside.int().argmax(1, keepdim=True) + offsets).clamp(max=batch.rows.shape[1] - 1)
    real = offsets < numbers

    def taken(values: torch.Tensor, padding: int) -> torch.Tensor:
        deep = (...,) + (None,) * (values.ndim - 2)
        return torch.where(real[deep], torch.take_along_dim(values, index[deep], 1), padding)

    return replace(
        batch,
        ids=batch.ids[:, first:after],
        rows=taken(batch.rows - first, after - first),
        main_targets=taken(batch.main_targets, IGNORE),
        targets=taken(batch.targets, IGNORE),
        parents=taken(batch.parents, 0),
    )


def segment_outputs(
    model: StreamModel,
    segment: Segment,
    caches: Caches,
    main: bool,
    early: bool,
    checkpointing: bool = False,
) -> tuple[Outputs, Caches]:
    """Logits of one segment after the earlier ones whose keys and values are `caches` (per layer).

    In lossless mode main rows depend on nothing trainable, so a segment's gradients are complete
    without its predecessors'; in shared mode the values are right, but no gradient passes through
    `caches`. A segment that carries no streams gives `Outputs` of None.
    """
    rows, first_msa_layer = _main_rows(model, segment), model.first_msa_layer
    layer = recomputed(model.layer) if checkpointing else model.layer
    extended: Caches = []
    early_logits = None
    for index in range(model.architecture.num_layers):
        if index == first_msa_layer and segment.carries:
            if early:
                early_logits = model.early_logits(at_rows(rows.main.detach(), segment.batch.rows))
            rows = model.start_streams(rows, segment.batch.rows)
        rows, new = layer(index, rows, caches[index] if caches else None)
        extended.append(_joined(caches[index] if caches else None, new))
    if not segment.carries:
        return Outputs(None, None, None), extended
    main_logits = model.logits(at_rows(rows.main, segment.batch.rows)) if main else None
    return Outputs(
        stream_logits_of(model, rows, segment.batch.parents), main_logits, early_logits
    ), extended


def recomputing_loss(
    model: StreamModel, segments: Sequence[Segment], weights: LossWeights
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The batch's loss and parts in one graph that keeps only what passes between layers.

    For shared mode, where main rows carry gradients (and in v2 depend on their streams), so segments
    are not independent. Each layer runs segment after segment, and what happens inside is computed
    again in the backward pass: attention weights, feed-forward and logits of one segment in one layer
    exist at a time. What stays are the hidden states between layers, linear in the length.
    """
    model_layer = recomputed(_layer_after)
    all_rows = [_main_rows(model, segment) for segment in segments]
    at_exit: list[torch.Tensor | None] = [None] * len(all_rows)
    for index in range(model.architecture.num_layers):
        if index == model.first_msa_layer:
            for number, segment in enumerate(segments):
                at_exit[number] = all_rows[number].main.detach()
                if segment.carries:
                    all_rows[number] = model.start_streams(all_rows[number], segment.batch.rows)
        earlier: list[KeysValues] = []
        for number, rows in enumerate(all_rows):
            all_rows[number], new = model_layer(model, index, rows, tuple(earlier))
            earlier.append(new)
    total: torch.Tensor | float = 0.0
    parts: dict[str, torch.Tensor] = {}
    for rows, exit_states, segment in zip(all_rows, at_exit, segments, strict=True):
        if segment.carries:
            loss, some = recomputed(_segment_loss)(model, rows, exit_states, segment.batch, weights)
            total = total + loss
            parts = added(parts, some)
    return total, parts


def added(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sums by name; a name that only `other` has is taken over."""
    return {name: one.get(name, 0.0) + value for name, value in other.items()}


def _layer_after(model, index, rows, earlier):
    """A layer whose past is the earlier segments' keys and values, joined inside (not kept twice)."""
    past = tuple(torch.cat(tensors, 2) for tensors in zip(*earlier, strict=True)) if earlier else None
    return model.layer(index, rows, past)


def _segment_loss(model, rows, exit_states, batch, weights):
    streams = stream_logits_of(model, rows, batch.parents)
    main = model.logits(at_rows(rows.main, batch.rows)) if weights.main else None
    early = model.early_logits(at_rows(exit_states, batch.rows)) if weights.early else None
    return weighted_loss(Outputs(streams, main, early), batch, weights)


def _main_rows(model: StreamModel, segment: Segment) -> Rows:
    ids, first = segment.batch.ids, segment.first
    length = ids.shape[1]
    positions = torch.arange(first, first + length, device=ids.device).expand_as(ids)
    visible = torch.ones(length, first + length, dtype=torch.bool, device=ids.device).tril(first)
    hidden, mask = model.embed(ids, positions), visible.expand(len(ids), -1, -1)
    return Rows(hidden, positions, mask, context=segment.length)


def _joined(past: KeysValues | None, new: KeysValues) -> KeysValues:
    new = (new[0].detach(), new[1].detach())
    return new if past is None else tuple(torch.cat(pair, 2) for pair in zip(past, new, strict=True))
