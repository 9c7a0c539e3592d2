"""The training objective as a module, so that DDP and FSDP see every forward pass."""

from __future__ import annotations

import torch
from torch import nn

from ss_device.reference.stream_model import StreamModel
from ss_device.training.losses import Batch, forward, weighted_loss
from ss_device.training.schedule import AdapterSchedule, loss_weights
from ss_device.training.segments import Caches, Segment, recomputing_loss, segment_outputs
from ss_device.training.validation import batch_ranks, segment_ranks

Parts = dict[str, torch.Tensor]


class StreamLoss(nn.Module):
    """Loss of a batch, of one segment of it (lossless mode), or of all its segments in one graph.

    `objective(batch)` and `objective(list of segments)` give (loss, parts); `objective(segment, caches)`
    gives (loss, parts, caches). With `ranks` the ranks of the true tokens instead (`batch_ranks`,
    `segment_ranks`).
    """

    def __init__(self, model: StreamModel, schedule: AdapterSchedule | None = None) -> None:
        super().__init__()
        schedule = schedule or AdapterSchedule()
        self.model = model
        self.weights = loss_weights(model.config, schedule)
        self.checkpointing = schedule.gradient_checkpointing
        self.half = schedule.computes_in_half

    def forward(
        self, batch: Batch | Segment | list[Segment], caches: Caches | None = None, ranks: bool = False
    ):
        ids = batch[0].batch.ids if isinstance(batch, list) else getattr(batch, "batch", batch).ids
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.half):
            if isinstance(batch, list):
                return recomputing_loss(self.model, batch, self.weights)
            if isinstance(batch, Segment):
                one = segment_ranks if ranks else self._segment
                return one(self.model, batch, caches or [])
            return batch_ranks(self.model, batch) if ranks else self._whole(batch)

    def _whole(self, batch: Batch) -> tuple[torch.Tensor, Parts]:
        weights = self.weights
        out = forward(
            self.model,
            batch,
            main=weights.needs_main,
            early=weights.early > 0,
            streams=any(weights.streams),
            checkpointing=self.checkpointing,
        )
        return weighted_loss(out, batch, weights)

    def _segment(self, model, segment: Segment, caches: Caches) -> tuple[torch.Tensor, Parts, Caches]:
        weights, main = self.weights, self.weights.main > 0
        out, caches = segment_outputs(
            model, segment, caches, main, early=weights.early > 0, checkpointing=self.checkpointing
        )
        return *weighted_loss(out, segment.batch, weights), caches
