"""Adapter training: streams (and, in shared mode, LoRA) on a base model, resumable, on accelerate."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from ss_device.adapter import Adapter, write_speculative_files
from ss_device.application import Application
from ss_device.base_model import BaseFolder
from ss_device.config import SpeculativeConfig
from ss_device.errors import UserError
from ss_device.files import folder_in_one_go
from ss_device.reference.stream_model import StreamModel, add_lora, load_base
from ss_device.training.batching import plan_batches
from ss_device.training.checkpoint import load_checkpoint, save_checkpoint, trainable
from ss_device.training.corpus import Document
from ss_device.training.log import open_log
from ss_device.training.losses import StreamLoss, make_batch, rank_statistics


@dataclass(frozen=True)
class AdapterSchedule:
    """Optimisation of an adapter. Linear decay from `learning_rate`; weights as in METHOD: Modes."""

    epochs: float = 5.0
    tokens_per_batch: int = 2048
    learning_rate: float = 5e-4
    warmup_steps: int = 20
    seed: int = 0
    checkpoint_minutes: float = 5.0


def build_stream_model(base: BaseFolder, config: SpeculativeConfig, seed: int) -> StreamModel:
    """Frozen base in float32 with freshly initialised parts (and LoRA in shared mode)."""
    torch.manual_seed(seed)
    model = load_base(base)
    if config.lora_rank:
        model = add_lora(model, config)
    return StreamModel(model, base.architecture, config)


def train_adapter(
    base: BaseFolder,
    app: Application,
    config: SpeculativeConfig,
    schedule: AdapterSchedule,
    train: Sequence[Document],
    valid: Sequence[Document],
    output: Path,
    resume: bool = False,
    report: Callable[[dict], None] = lambda line: None,
    start: Adapter | None = None,
) -> Adapter:
    """Train an adapter and write its folder to `output`; checkpoints and log in `<output>.run/`.

    `start`: a lossless adapter of the same settings whose parts are the starting point.

    `report` receives every log record: step, steps, loss, parts, tokens/s, eta seconds.
    """
    run = output.with_name(output.name + ".run")
    if not resume:
        shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True, exist_ok=True)
    settings = {"config": config.to_dict(), "schedule": asdict(schedule), "documents": len(train)}
    _check_settings(run / "settings.json", settings)
    accelerator = Accelerator()
    model = build_stream_model(base, config, schedule.seed)
    if start is not None:
        _start_from(model, start, base)
    optimizer = torch.optim.AdamW(
        list(trainable(model).values()), lr=schedule.learning_rate, weight_decay=0.0
    )
    plan = _plan(train, schedule)
    record = load_checkpoint(run / "checkpoint", model, optimizer) if resume else None
    objective, optimizer = accelerator.prepare(StreamLoss(model), optimizer)
    history = _run(accelerator, objective, optimizer, schedule, train, plan, run, record, report)
    model = accelerator.unwrap_model(objective).model.eval()
    statistics = rank_statistics(model, _batches(valid, config, accelerator.device))
    adapter = Adapter(
        app=app.name,
        config=config,
        base=base.identity,
        tensors=model.parts.to_numpy(),
        prompt_template=app.template,
        stop_strings=app.stop_strings,
        max_tokens=app.max_tokens,
        record={**asdict(schedule), **history, "documents": len(train)},
        rank_statistics=statistics,
    )
    if accelerator.is_main_process:
        _write(adapter, base, model, output)
    return adapter


def _start_from(model: StreamModel, start: Adapter, base: BaseFolder) -> None:
    """Copy a trained adapter's parts in; UserError when it has other settings or another base."""
    start.check_base(base)
    if start.config != model.config or start.lora:
        raise UserError(f"adapter '{start.app}' to start from has other settings, or has LoRA files")
    model.parts.from_numpy(start.tensors)


def _write(adapter: Adapter, base: BaseFolder, model: StreamModel, output: Path) -> None:
    with folder_in_one_go(output) as folder:
        if adapter.config.lora_rank:
            model.base.save_pretrained(folder, safe_serialization=True)
            (folder / "README.md").unlink(missing_ok=True)
        write_speculative_files(adapter, base.architecture, folder)


def _check_settings(path: Path, settings: dict) -> None:
    if path.is_file() and json.loads(path.read_text()) != settings:
        raise UserError(f"{path.parent}: the run to resume had other settings or data; drop --resume")
    path.write_text(json.dumps(settings, indent=1))


def _plan(documents: Sequence[Document], schedule: AdapterSchedule) -> list[list[int]]:
    """Batches of document indices for all epochs, in an order fixed by the seed."""
    rng = np.random.default_rng(schedule.seed)
    plan: list[list[int]] = []
    epochs = []
    while len(epochs) < schedule.epochs:
        order = rng.permutation(len(documents)).tolist()
        lengths = [len(documents[i].ids) for i in order]
        batches = plan_batches(lengths, schedule.tokens_per_batch, rng)
        epochs.append(len(batches))
        plan.extend([order[i] for i in batch] for batch in batches)
    return plan[: max(1, round(schedule.epochs * epochs[0]))]


def _batches(documents, config, device) -> list:
    plan = plan_batches([len(d.ids) for d in documents], 2048, np.random.default_rng(0))
    return [make_batch([documents[i] for i in b], config.num_streams).to(device) for b in plan]


def learning_rate(step: int, steps: int, schedule: AdapterSchedule) -> float:
    """Linear warm-up over `warmup_steps`, then linear decay to zero at `steps`."""
    warm = min(1.0, (step + 1) / max(1, schedule.warmup_steps))
    return schedule.learning_rate * warm * max(0.0, 1 - step / max(1, steps))


def _run(accelerator, objective, optimizer, schedule, documents, plan, run, record, report) -> dict:
    model = accelerator.unwrap_model(objective).model
    record = record or {"step": 0, "parts": {}, "seconds": 0.0}
    first, average = record["step"], record["parts"]
    started = saved = time.monotonic()
    objective.train()

    def seconds() -> float:
        return record["seconds"] + time.monotonic() - started

    with open_log(run / "log.jsonl", first) as log:
        for step in range(first, len(plan)):
            share = plan[step][accelerator.process_index :: accelerator.num_processes] or plan[step][:1]
            batch = make_batch([documents[i] for i in share], model.config.num_streams)
            rate = learning_rate(step, len(plan), schedule)
            parts = _step(accelerator, objective, optimizer, batch.to(accelerator.device), rate)
            average = {n: 0.97 * average.get(n, v) + 0.03 * v for n, v in parts.items()}
            if (step + 1) % 10 == 0 or step + 1 == len(plan):
                line = _log_line(step, first, len(plan), average, seconds(), time.monotonic() - started)
                log.write(json.dumps(line) + "\n")
                log.flush()
                report(line)
            if time.monotonic() - saved > 60 * schedule.checkpoint_minutes and accelerator.is_main_process:
                state = {"step": step + 1, "parts": average, "seconds": seconds()}
                save_checkpoint(run / "checkpoint", model, optimizer, state)
                saved = time.monotonic()
    final = {n: round(v, 4) for n, v in average.items()}
    return {"steps": len(plan), "seconds": round(seconds(), 1), "final_losses": final}


def _step(accelerator, objective, optimizer, batch, rate: float) -> dict[str, float]:
    """One optimizer step; returns the loss parts. A loss that is not finite stops the run."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    with accelerator.autocast():
        loss, parts = objective(batch)
    if not torch.isfinite(loss):
        raise FloatingPointError("the loss is not finite; lower the learning rate")
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(objective.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return {name: float(value) for name, value in parts.items()}


def _log_line(step, first, steps, average, seconds, elapsed) -> dict:
    return {
        "step": step + 1,
        "steps": steps,
        "parts": {n: round(v, 4) for n, v in average.items()},
        "seconds": round(seconds, 1),
        "eta": round(elapsed / (step + 1 - first) * (steps - step - 1)),
    }
