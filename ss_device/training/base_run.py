"""One stretch of a base run: steps, learning rate, log, checkpoints, measurements."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.nn import functional
from transformers import LlamaForCausalLM

from ss_device.errors import NotFinite, UserError
from ss_device.training.base_checks import BaseChecks
from ss_device.training.batching import collate
from ss_device.training.budget import Budget, StepClock, learning_rate
from ss_device.training.checkpoint import save_checkpoint
from ss_device.training.corpus import Document
from ss_device.training.document_stream import DocumentStream
from ss_device.training.log import open_log
from ss_device.training.recipe import Recipe, Schedule

LOG_EVERY = 10
CUDA_WIDTH = 64
"""On a GPU rows are padded to a multiple of this, so that few shapes are compiled."""


@dataclass(frozen=True)
class Stretch:
    """A stretch's budget, with the step and seconds of training at which it began."""

    steps: int
    minutes: float
    hold: bool
    first_step: int
    before: float

    def __post_init__(self) -> None:
        if not self.budget.steps and not self.budget.minutes:
            raise UserError("a stretch is so many steps or minutes")
        if min(self.first_step, self.before) < 0:
            raise UserError("a stretch must not begin before the run")

    @property
    def budget(self) -> Budget:
        """How long it is."""
        return Budget(self.steps, self.minutes, self.hold)


@dataclass
class Progress:
    """What a checkpoint remembers besides tensors.

    step, tokens, seconds: over all stretches; loss: smoothed; stretch: the present one (None: before the
    first); held: whether its decay has begun; stream: where the documents go on; checked: seconds at the
    last measurement on held-out rows.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float | None = None
    stretch: Stretch | None = None
    held: bool = False
    stream: dict = field(default_factory=dict)
    checked: float = 0.0

    def __post_init__(self) -> None:
        if min(self.step, self.tokens, self.seconds) < 0:
            raise UserError("step, tokens and seconds must not be negative")
        if self.stretch and (self.stretch.first_step > self.step or self.stretch.before > self.seconds):
            raise UserError("a stretch began at a step and second that the run has not come to")

    def done(self) -> float:
        """The share of the present stretch that lies behind."""
        steps, seconds = self.step - self.stretch.first_step, self.seconds - self.stretch.before
        return self.stretch.budget.done(steps, seconds)


class NextTokenLoss(torch.nn.Module):
    """A causal model and its loss as one module, so that DDP and FSDP see every pass."""

    def __init__(self, model: LlamaForCausalLM, precision: str = "fp32", compiled: bool = False) -> None:
        super().__init__()
        self.model, self.half = model, precision == "bf16"
        if compiled:
            self.model.model.compile(dynamic=True)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean next-token cross-entropy over `targets` (bool), the rows that the head sees. Both [B, T]."""
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.half):
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden[:, :-1][targets[:, 1:]])
        return functional.cross_entropy(logits.float(), ids[:, 1:][targets[:, 1:]])


@dataclass
class BaseRun:
    """One stretch of training: `run` goes on from `progress` to the end of its budget."""

    accelerator: Accelerator
    objective: torch.nn.Module
    optimizer: torch.optim.Optimizer
    recipe: Recipe
    stream: DocumentStream
    checks: BaseChecks
    folder: Path
    progress: Progress
    checkpoint_minutes: float
    check_minutes: float
    report: Callable[[dict], None]

    @property
    def budget(self) -> Budget:
        """How long the present stretch is."""
        return self.progress.stretch.budget

    @property
    def model(self) -> LlamaForCausalLM:
        """The model without what accelerate put around it."""
        return self.accelerator.unwrap_model(self.objective).model

    def done(self) -> float:
        """The completed share of the stretch, by the first process's clock."""
        shared = [self.progress.done()]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(shared)
        return shared[0]

    def run(self) -> None:
        """Train to the end of the stretch, with log, checkpoints and measurements on the way."""
        progress, first = self.progress, self.progress.step
        before, counted = progress.seconds, progress.tokens
        saved, clock = time.monotonic(), StepClock()
        if progress.step and progress.step == progress.stretch.first_step:
            self._save("checkpoint")  # so that a kill does not take the stretch for one not begun
        log = open_log(self.folder / "log.jsonl", first) if self.accelerator.is_main_process else None
        while (done := self.done()) < 1:
            if not progress.held and self.budget.decaying(done, self.recipe.schedule):
                progress.held = True
                self._save("held")
            value = self._step(done)
            progress.loss = value if progress.loss is None else 0.98 * progress.loss + 0.02 * value
            progress.seconds += clock.step()
            speed = (progress.tokens - counted) / max(progress.seconds - before, 1e-9)
            ended = self.done() >= 1
            valid = self._measured(ended)
            if log and (progress.step % LOG_EVERY == 0 or ended or valid):
                self._write(log, speed, valid)
            if time.monotonic() - saved > 60 * self.checkpoint_minutes:
                self._save("checkpoint")
                saved = time.monotonic()
            clock.start()
        if self.budget.hold:
            self._save("held")
        self._save("checkpoint")

    def _step(self, done: float) -> float:
        """One optimizer step on this process's share of the next batch; the mean loss of all shares."""
        accelerator, progress, schedule = self.accelerator, self.progress, self.recipe.schedule
        rate = learning_rate(progress.step, done, self.budget, schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        documents = self.stream.next_batch()
        share = documents[accelerator.process_index :: accelerator.num_processes] or documents[:1]
        rng = np.random.default_rng([self.recipe.seed, progress.step, accelerator.process_index])
        value = train_step(accelerator, self.objective, self.optimizer, share, schedule, rng)
        if not math.isfinite(value):
            step = progress.step + 1
            raise NotFinite(
                f"loss is {value} at step {step}; lower the learning rate (or check the weights)"
            )
        progress.step += 1
        progress.tokens += sum(len(d.ids) for d in documents)
        return value

    def _measured(self, ended: bool) -> dict:
        """What held-out rows say, where that is due."""
        progress = self.progress
        due = self.check_minutes and progress.seconds - progress.checked >= 60 * self.check_minutes
        if not self.accelerator.is_main_process or not (due or ended):
            return {}
        progress.checked = progress.seconds
        return self.checks.measure(self.model, self.accelerator.device)

    def _write(self, log, speed: float, valid: dict) -> None:
        progress, budget, first = self.progress, self.budget, self.progress.stretch.first_step
        done = progress.done()
        seconds = progress.seconds - progress.stretch.before
        left = seconds / max(done, 1e-9) * (1 - done)
        steps = budget.steps or round((progress.step - first) / max(done, 1e-9))
        line = {
            "step": progress.step,
            "steps": first + steps,
            "loss": round(progress.loss, 4),
            "lr": round(self.optimizer.param_groups[0]["lr"], 8),
            "tokens": progress.tokens,
            "tokens_per_second": round(speed),
            "eta": round(left),
            **({"epochs": self.stream.epochs(), "valid": valid} if valid else {}),
        }
        log.write(json.dumps(line) + "\n")
        log.flush()
        self.report(line)

    def _save(self, name: str) -> None:
        if self.accelerator.is_main_process:
            self.progress.stream = self.stream.state()
            save_checkpoint(self.folder / name, self.model, self.optimizer, asdict(self.progress))


def train_step(
    accelerator: Accelerator,
    objective: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    documents: list[Document],
    schedule: Schedule,
    rng: np.random.Generator,
) -> float:
    """One optimizer step on `documents`; the loss, averaged over the processes."""
    multiple = CUDA_WIDTH if accelerator.device.type == "cuda" else 1
    ids, weights = collate(documents, 0, schedule.prompt_weight, multiple)
    targets = rng.random(weights.shape) < weights
    ids, targets = (torch.from_numpy(a).to(accelerator.device) for a in (ids, targets))
    loss = objective(ids, targets)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(objective.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return accelerator.reduce(loss.detach(), "mean").item()
