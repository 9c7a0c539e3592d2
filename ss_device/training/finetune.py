"""Plain LoRA fine-tuning, the quality baseline of shared adapters: no streams, a plain PEFT folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from peft import PeftModel
from torch.nn import functional

from ss_device.application import Application
from ss_device.base_model import BaseFolder
from ss_device.config import SpeculativeConfig
from ss_device.errors import NotFinite, UserError, library_errors
from ss_device.files import check_plain
from ss_device.outputs import check_output_folder, folder_in_one_go, holds_only
from ss_device.reference.device import chosen_device
from ss_device.reference.stream_model import add_lora, load_base
from ss_device.strict_json import read_json, typed
from ss_device.training.batching import collate
from ss_device.training.checkpoint import check_step, load_checkpoint, save_checkpoint, trainable
from ss_device.training.corpus import Document
from ss_device.training.log import open_log
from ss_device.training.run_folder import open_run, run_folder
from ss_device.training.schedule import AdapterSchedule, learning_rate, plan_epochs
from ss_device.training.settings import NEW_RUN, LoRASettings, RunOptions

RECORD_FILE = "finetune.json"
FILES = (RECORD_FILE, "adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class Progress:
    """What a checkpoint remembers besides tensors: steps done, smoothed loss."""

    step: int = 0
    loss: float | None = None

    def __post_init__(self) -> None:
        if self.step < 0 or (self.loss is None) != (self.step == 0):
            raise UserError(f"step {self.step} with a loss of {self.loss}")


def train_lora(
    base: BaseFolder,
    app: Application,
    settings: LoRASettings,
    schedule: AdapterSchedule,
    documents: Sequence[Document],
    output: Path,
    run: RunOptions = NEW_RUN,
    report: Callable[[dict], None] = lambda line: None,
) -> None:
    """Fine-tune LoRA on all projections (mean CE over generated tokens) and write a PEFT folder.

    Same order of batches and same rates as an adapter with this schedule. Checkpoints and log are in
    `<output>.run/`. Beside peft's own files, finetune.json says base, application and training. With
    `run.force` an earlier run and what it wrote are replaced.
    """
    where, folder = chosen_device(run.device), run_folder(output)
    compared = {**asdict(settings), "schedule": asdict(schedule), "documents": len(documents)}
    check_output_folder(output, "a LoRA", lambda found: holds_only(found, FILES), run.force or run.resume)
    open_run(folder, compared, run.resume, run.force)
    torch.manual_seed(schedule.seed)
    config = SpeculativeConfig(mode="shared", lora_rank=settings.rank, lora_alpha=settings.alpha)
    model = add_lora(load_base(base), base.architecture, config).to(where)
    optimizer = torch.optim.AdamW(
        list(trainable(model).values()), lr=schedule.learning_rate, weight_decay=0.0
    )
    record = load_checkpoint(folder / "checkpoint", model, optimizer) if run.resume else None
    loss = _run(model, optimizer, schedule, documents, folder, record, report)
    with folder_in_one_go(output) as written:
        save_lora(model, written)
        parameters = sum(p.numel() for p in trainable(model).values())
        raw = {"app": app.name, "base": base.identity.to_dict(), "parameters": parameters,
               "final_loss": loss, **compared}  # fmt: skip
        (written / RECORD_FILE).write_text(json.dumps(raw, indent=1) + "\n")


def save_lora(model: PeftModel, folder: Path) -> None:
    """Write the PEFT files of a LoRA on projections.

    Without being told so, peft would read the base's config again, or ask the hub for it, to see whether
    the embedding has grown.
    """
    model.save_pretrained(folder, safe_serialization=True, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)


def _run(model, optimizer, schedule, documents, run, record, report) -> float:
    plan = plan_epochs(documents, schedule)
    progress = typed(Progress, record or {}, f"{run / 'checkpoint'}: record.json")
    check_step(progress.step, len(plan), run)
    first, average = progress.step, progress.loss
    started = saved = time.monotonic()
    model.train()
    with open_log(run / "log.jsonl", first) as log:
        for step in range(first, len(plan)):
            rate = learning_rate(step, len(plan), schedule)
            value = _step(model, optimizer, [documents[i] for i in plan[step]], rate)
            average = value if average is None else 0.97 * average + 0.03 * value
            if (step + 1) % 10 == 0 or step + 1 == len(plan):
                eta = (time.monotonic() - started) / (step + 1 - first) * (len(plan) - step - 1)
                line = {
                    "step": step + 1,
                    "steps": len(plan),
                    "loss": round(average, 4),
                    "eta": round(eta),
                }
                log.write(json.dumps(line) + "\n")
                log.flush()
                report(line)
            if time.monotonic() - saved > 60 * schedule.checkpoint_minutes:
                state = {"step": step + 1, "loss": average}
                save_checkpoint(run / "checkpoint", model, optimizer, state)
                saved = time.monotonic()
    return round(average, 4)


def _step(model, optimizer, documents, rate: float) -> float:
    """One optimizer step; a loss that is not finite stops the run."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    device = next(model.parameters()).device
    ids, weights = (torch.from_numpy(a).to(device) for a in collate(documents, 0, 0.0))
    with library_errors("transformers cannot run the base model"):
        logits = model(input_ids=ids, use_cache=False).logits
    loss = weighted_loss(logits, ids, weights)
    if not torch.isfinite(loss):
        raise NotFinite(
            "the loss is not finite; lower the learning rate (at the first steps: check the base's weights)"
        )
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def weighted_loss(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Next-token cross-entropy, mean over target weights. logits [B, T, V], ids and weights [B, T]."""
    losses = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
    )
    targets = weights[:, 1:].flatten()
    return (losses * targets).sum() / targets.sum().clamp(min=1.0)


def _table(raw: dict, name: str, folder: Path) -> dict:
    if not isinstance(raw.get(name), dict):
        raise UserError(f"{folder / RECORD_FILE}: '{name}' is missing or no table")
    return raw[name]


def load_lora(base: BaseFolder, folder: Path, device: torch.device | str = "cpu") -> torch.nn.Module:
    """Base and a PEFT folder as one model in evaluation mode on `device`.

    Raises UserError when the folder is none, or its finetune.json names another base.
    """
    if not (folder / "adapter_model.safetensors").is_file():
        raise UserError(f"{folder}: not a PEFT folder (no adapter_model.safetensors)")
    check_plain(folder)
    if (folder / RECORD_FILE).is_file():
        trained = _table(read_json(folder / RECORD_FILE), "base", folder)
        if trained.get("sha256") != base.identity.sha256:
            raise UserError(
                f"{folder}: trained on base '{trained.get('name')}', this is '{base.path.name}'"
            )
    model = load_base(base)
    with library_errors(f"{folder}: peft cannot load this LoRA"):
        return PeftModel.from_pretrained(model, folder).to(device).eval()
