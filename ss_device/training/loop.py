"""The training loop of an adapter: steps on one or several processes, log, validation, checkpoints."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast

from ss_device.errors import UserError
from ss_device.training.checkpoint import check_step, load_best, save_best, save_checkpoint
from ss_device.training.corpus import Document
from ss_device.training.log import open_log
from ss_device.training.losses import IGNORE, Batch, make_batch, target_counts
from ss_device.training.objective import StreamLoss
from ss_device.training.schedule import AdapterSchedule, learning_rate
from ss_device.training.segments import Caches, added, split, stream_spans
from ss_device.training.validation import document_ranks, summary

LOG_EVERY = 10
VALIDATION_DOCUMENTS = 64
"""Enough to see a trend; all held-out documents are measured once, at the end."""


@dataclass
class Progress:
    """What a checkpoint remembers besides tensors: all that the rest of the run depends on.

    step: steps done; parts: smoothed losses; seconds, tokens: so far; best: score and step of the best
    validation; stale: validations since.
    """

    step: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    tokens: int = 0
    best: dict[str, int | float] = field(default_factory=dict)
    stale: int = 0

    def __post_init__(self) -> None:
        if min(self.step, self.tokens, self.seconds, self.stale) < 0:
            raise UserError("step, tokens, seconds and stale must not be negative")
        if self.best and set(self.best) != {"score", "step"}:
            raise UserError("best has other entries than score and step")


@dataclass
class TrainingRun:
    """One run: what is trained on what, and where it writes. `plan`: documents of each step."""

    accelerator: Accelerator
    objective: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: AdapterSchedule
    documents: Sequence[Document]
    valid: Sequence[Document]
    plan: list[list[int]]
    folder: Path
    report: Callable[[dict], None]

    @cached_property
    def loss_module(self) -> StreamLoss:
        """The objective without what accelerate put around it."""
        return self.accelerator.unwrap_model(self.objective)

    def run(self, progress: Progress) -> Progress:
        """Train from `progress` to the end of the plan, or until validation stops improving."""
        main = self.accelerator.is_main_process
        check_step(progress.step, len(self.plan), self.folder)
        first, before = progress.step, progress.seconds
        counted, started = progress.tokens, time.monotonic()
        saved = started
        self.objective.train()
        with open_log(self.folder / "log.jsonl", first) if main else contextlib.nullcontext() as log:
            while progress.step < len(self.plan) and not self._exhausted(progress):
                self._step(progress)
                elapsed = time.monotonic() - started
                progress.seconds = before + elapsed
                line = self._line(progress, first, elapsed, progress.tokens - counted)
                if line and main:
                    log.write(json.dumps(line) + "\n")
                    log.flush()
                    self.report(line)
                if self._due(saved):
                    self._save(progress)
                    saved = time.monotonic()
        self._save(progress)
        if self.schedule.patience and progress.best:
            load_best(self.folder / "best", self.loss_module.model)
        return progress

    def _step(self, progress: Progress) -> None:
        """One optimizer step. A loss that is not finite stops the run."""
        documents = [self.documents[i] for i in self.plan[progress.step]]
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(progress.step, len(self.plan), self.schedule)
        parts = self._gradients(documents)
        self.accelerator.clip_grad_norm_(self.objective.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        average = progress.parts
        progress.parts = {n: 0.97 * average.get(n, v) + 0.03 * v for n, v in parts.items()}
        progress.tokens += sum(len(d.ids) for d in documents)
        progress.step += 1

    def _gradients(self, documents: Sequence[Document]) -> dict[str, float]:
        """Gradients of this process's share; the loss parts of all processes together."""
        accelerator, config = self.accelerator, self.loss_module.model.config
        batch = process_share(
            documents, accelerator.process_index, accelerator.num_processes, config.num_streams
        ).to(accelerator.device)
        size = 0 if self.schedule.pruning == "after" else self.schedule.segment
        spans = stream_spans(documents, size) if size else []
        parts = batch_gradients(accelerator, self.objective, batch, size, spans, config.mode == "shared")
        values = torch.stack(list(parts.values()))
        values = accelerator.reduce(values, "mean") if accelerator.num_processes > 1 else values
        return dict(zip(parts, values.tolist(), strict=True))

    def _line(self, progress: Progress, first: int, elapsed: float, tokens: int) -> dict | None:
        """The log record after a step, with what validation says where that is due; None between."""
        step, steps, every = progress.step, len(self.plan), self.schedule.evaluate_every
        validates = bool(every) and bool(self.valid) and (step % every == 0 or step == steps)
        if step % LOG_EVERY and step != steps and not validates:
            return None
        line = {
            "step": step,
            "steps": steps,
            "parts": {n: round(v, 4) for n, v in progress.parts.items()},
            "seconds": round(progress.seconds, 1),
            "tokens_per_second": round(tokens / max(elapsed, 1e-9)),
            "eta": round(elapsed / (step - first) * (steps - step)),
        }
        if validates:
            line["valid"] = self._validate(progress)
        return line

    def _validate(self, progress: Progress) -> dict:
        """Measure held-out text; keep the weights when they are the best so far."""
        self.objective.eval()
        config, schedule = self.loss_module.model.config, self.schedule
        ranks = document_ranks(
            self.objective,
            self.valid[:VALIDATION_DOCUMENTS],
            config.num_streams,
            self.accelerator.device,
            schedule.tokens_per_batch,
            schedule.segment,
        )
        self.objective.train()
        result = summary(ranks)
        score = result["early_top1" if schedule.pruning == "after" else "tokens_per_call_top3"]
        progress.stale += 1
        if not progress.best or score > progress.best["score"]:
            progress.best, progress.stale = {"score": score, "step": progress.step}, 0
            save_best(self.folder / "best", self.loss_module.model, self.accelerator.is_main_process)
        return result

    def _exhausted(self, progress: Progress) -> bool:
        return bool(self.schedule.patience) and progress.stale >= self.schedule.patience

    def _due(self, saved: float) -> bool:
        """Whether a checkpoint is due; the first process's clock decides for all."""
        due = time.monotonic() - saved > 60 * self.schedule.checkpoint_minutes
        if self.accelerator.num_processes == 1:
            return due
        return bool(broadcast(torch.tensor(int(due), device=self.accelerator.device)).item())

    def _save(self, progress: Progress) -> None:
        write = self.accelerator.is_main_process
        model = self.loss_module.model
        save_checkpoint(self.folder / "checkpoint", model, self.optimizer, asdict(progress), write)


def batch_gradients(
    accelerator: Accelerator,
    objective: torch.nn.Module,
    batch: Batch,
    size: int,
    spans: Sequence[bool],
    shared: bool,
) -> dict[str, torch.Tensor]:
    """Forward and backward of a batch, in segments of `size` positions (0: at once); its loss parts.

    In lossless mode one segment after the other, gradients adding up in the parameters; in shared mode
    through one graph that recomputes. `spans`: `stream_spans` of the documents of all processes.
    """
    if size and not shared:
        return _segment_gradients(accelerator, objective, batch, size, spans)
    loss, parts = objective(list(split(batch, size, spans)) if size else batch)
    _backward(accelerator, loss)
    return parts


def _segment_gradients(accelerator, objective, batch, size, spans) -> dict[str, torch.Tensor]:
    parts: dict[str, torch.Tensor] = {}
    caches: Caches = []
    for segment in split(batch, size, spans):
        if not segment.carries:
            with torch.no_grad():
                _, _, caches = objective(segment, caches)
            continue
        with contextlib.nullcontext() if segment.last else accelerator.no_sync(objective):
            loss, some, caches = objective(segment, caches)
            _backward(accelerator, loss)
        parts = added(parts, some)
    return parts


def _backward(accelerator: Accelerator, loss: torch.Tensor) -> None:
    if not torch.isfinite(loss):
        raise UserError(
            "the loss is not finite; lower the learning rate (at the first steps: check the weights of "
            "base, adapter and bigram bias)"
        )
    accelerator.backward(loss)


def process_share(documents: Sequence[Document], rank: int, processes: int, num_streams: int) -> Batch:
    """This process's part of a step's documents.

    Its means divide by the targets of all processes over their number: averaging gradients and parts
    over processes then gives exactly those of the whole batch. A process without documents gets one
    without targets.
    """
    width = max(len(d.ids) for d in documents)
    share = documents[rank::processes]
    batch = make_batch(share or documents[:1], num_streams, width=width)
    if processes == 1:
        return batch
    if not share:
        nothing = {n: torch.full_like(getattr(batch, n), IGNORE) for n in ("main_targets", "targets")}
        batch = replace(batch, **nothing)
    counts = torch.from_numpy(target_counts(documents, num_streams)).clamp(min=1)
    return replace(batch, counts=counts.float() / processes)
