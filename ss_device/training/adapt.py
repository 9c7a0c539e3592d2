"""Adapter training: streams (and, in shared mode, LoRA) on a base model, resumable, on accelerate."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import DistributedType

from ss_device.adapter import GOLDEN_PROMPTS, Adapter, is_adapter, write_speculative_files
from ss_device.application import Application
from ss_device.base_model import BaseFolder
from ss_device.config import SpeculativeConfig
from ss_device.errors import UserError
from ss_device.outputs import check_output_folder, folder_in_one_go
from ss_device.reference.stream_model import StreamModel, add_lora, attach_adapter, load_base
from ss_device.strict_json import typed
from ss_device.training.base_loading import check_quantization, load_training_base
from ss_device.training.checkpoint import copy_trainable, load_checkpoint, trainable
from ss_device.training.corpus import Document
from ss_device.training.finetune import save_lora
from ss_device.training.loop import VALIDATION_DOCUMENTS, Progress, TrainingRun
from ss_device.training.objective import StreamLoss
from ss_device.training.processes import joined_processes
from ss_device.training.run_folder import open_run, run_folder
from ss_device.training.schedule import AdapterSchedule, plan_epochs
from ss_device.training.settings import NEW_RUN, RunOptions
from ss_device.training.validation import document_ranks, rank_statistics, summary


def build_stream_model(
    base: BaseFolder,
    config: SpeculativeConfig,
    seed: int,
    schedule: AdapterSchedule | None = None,
    device: torch.device | str = "cpu",
) -> StreamModel:
    """Frozen base (as `schedule` says, by default float32) with freshly initialised parts and LoRA."""
    torch.manual_seed(seed)
    model = load_training_base(base, schedule or AdapterSchedule(), device)
    if config.lora_rank:
        model = add_lora(model, base.architecture, config)
    return StreamModel(model, base.architecture, config)


@dataclass(frozen=True)
class AdapterSettings:
    """What is trained, how, and from what.

    start: an adapter of the same settings whose parts (and LoRA) are the starting point; with `pruning`
    after, its parts stay as they are and only the early exit learns. bigram_bias: factors from
    `load_bigram_bias` to start from; with `bigram_shared` they are required and stay frozen.
    golden_prompts: what `golden_prompts.jsonl` of the folder holds, if anything.
    """

    config: SpeculativeConfig
    schedule: AdapterSchedule
    start: Adapter | None = None
    bigram_bias: dict[str, np.ndarray] | None = None
    golden_prompts: str = ""


def fit_adapter(
    base: BaseFolder,
    app: Application,
    settings: AdapterSettings,
    train: Sequence[Document],
    valid: Sequence[Document],
    output: Path,
    run: RunOptions = NEW_RUN,
    report: Callable[[dict], None] = lambda line: None,
) -> Adapter:
    """Train an adapter and write its folder to `output`; checkpoints and log in `<output>.run/`.

    With `run.force` an earlier run and the adapter it wrote are replaced. `report` receives every log
    record on the first process: step, steps, parts, seconds, tokens_per_second, eta (seconds), and `valid`
    (see `validation.summary`) where that was measured. Raises UserError for settings, documents, a start
    or a bigram bias that do not fit each other, and for a run that may not begin (`open_run`).
    """
    _check_inputs(base, settings, train)
    _check_bigram_bias(settings)
    accelerator = joined_processes(run.device)
    if accelerator.is_main_process:
        check_output_folder(output, "an adapter", is_adapter, run.force or run.resume)
        open_run(run_folder(output), _compared(base, settings, train, valid), run.resume, run.force)
    accelerator.wait_for_everyone()
    model = _initial_model(base, settings, accelerator.device)
    training = _training_run(accelerator, model, settings.schedule, train, valid, output, report)
    progress = training.run(_progress(training, run.resume))
    ranks = _final_ranks(training)
    model = _whole_model(accelerator, training.loss_module.model, base, settings)
    adapter = _adapter(base, app, settings, model, progress, len(train), ranks)
    if accelerator.is_main_process:
        _write(adapter, base, model, output, settings.golden_prompts)
    accelerator.wait_for_everyone()
    return adapter


def _training_run(accelerator, model, schedule, train, valid, output, report) -> TrainingRun:
    """Model and optimizer as accelerate takes them, with the batches of all epochs."""
    optimizer = torch.optim.AdamW(
        list(trainable(model).values()), lr=schedule.learning_rate, weight_decay=0.0
    )
    objective, optimizer = accelerator.prepare(StreamLoss(model, schedule), optimizer)
    plan, folder = plan_epochs(train, schedule), run_folder(output)
    return TrainingRun(accelerator, objective, optimizer, schedule, train, valid, plan, folder, report)


def _progress(run: TrainingRun, resume: bool) -> Progress:
    """Where the run begins: at the last checkpoint, which is loaded, or at nothing."""
    folder, record = run.folder / "checkpoint", None
    if resume:
        record = load_checkpoint(folder, run.loss_module.model, run.optimizer)
    return typed(Progress, record or {}, f"{folder}: record.json")


def _final_ranks(run: TrainingRun) -> list[np.ndarray]:
    """Ranks of the true tokens of all held-out documents, by the trained model."""
    run.objective.eval()
    streams, device = run.loss_module.model.config.num_streams, run.accelerator.device
    return document_ranks(run.objective, run.valid, streams, device, segment=run.schedule.segment)


def _check_inputs(base: BaseFolder, settings: AdapterSettings, train: Sequence[Document]) -> None:
    config, schedule, start = settings.config, settings.schedule, settings.start
    config.check(base.architecture)
    check_quantization(schedule)
    if not train:
        raise UserError("no documents to train on")
    longest, context = max(len(d.ids) for d in train), base.architecture.max_positions
    if longest > context:
        raise UserError(f"a document of {longest} tokens exceeds the base model's context of {context}")
    if schedule.pruning == "after":
        if start is None:
            raise UserError("pruning 'after' needs a trained adapter to start from")
        if not config.pruning_rank:
            raise UserError("pruning 'after' needs a pruning_rank above 0")
    if start is not None:
        start.check_base(base)
        own = start.config
        if schedule.pruning == "after":
            own = replace(own, pruning_rank=config.pruning_rank)
        if own != config:
            raise UserError(f"adapter '{start.app}' to start from has other settings")


def _check_bigram_bias(settings: AdapterSettings) -> None:
    given, config = settings.bigram_bias is not None, settings.config
    if given and not config.bigram_rank:
        raise UserError("a bigram bias needs settings with a bigram_rank above 0")
    if config.bigram_shared and not given and settings.start is None:
        raise UserError("bigram_shared needs the base's bigram bias (--bigram-bias)")


def _initial_model(base: BaseFolder, settings: AdapterSettings, device: torch.device) -> StreamModel:
    schedule = settings.schedule
    model = build_stream_model(base, settings.config, schedule.seed, schedule, device)
    if settings.start is not None:
        _start_from(model, settings.start, base)
    if settings.bigram_bias is not None:
        model.parts.from_numpy({**model.parts.to_numpy(), **settings.bigram_bias})
    if settings.config.bigram_shared:
        model.parts.bigram.requires_grad_(False)
    if schedule.pruning == "after":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("parts.pruning."))
    return model


def _start_from(model: StreamModel, start: Adapter, base: BaseFolder) -> None:
    """Copy a trained adapter's parts and LoRA in; a pruning head of another rank starts afresh."""
    own = model.parts.to_numpy()
    trained = {n: t for n, t in start.tensors.items() if n in own and t.shape == own[n].shape}
    model.parts.from_numpy({**own, **trained})
    if start.lora:
        donor = attach_adapter(load_base(base), base.architecture, start)
        lora = {n: t for n, t in donor.base.state_dict().items() if ".lora_" in n}
        model.base.load_state_dict(lora, strict=False)


def _whole_model(accelerator, model, base: BaseFolder, settings: AdapterSettings) -> StreamModel:
    """The trained model of this process; one that FSDP has cut up is put together again."""
    if accelerator.distributed_type != DistributedType.FSDP:
        return model
    whole = _initial_model(base, settings, accelerator.device)
    copy_trainable(model, whole)
    return whole


def _adapter(base, app, settings: AdapterSettings, model, progress, documents: int, ranks) -> Adapter:
    shown = ranks[:VALIDATION_DOCUMENTS]
    losses = {n: round(v, 4) for n, v in progress.parts.items()}
    history = {
        "steps": progress.step,
        "seconds": round(progress.seconds, 1),
        "tokens": progress.tokens,
        "final_losses": losses,
        "best": progress.best,
        "documents": documents,
        "validation": {"documents": len(shown), **summary(shown)},
    }
    return Adapter(
        app=app.name,
        config=settings.config,
        base=base.identity,
        tensors=model.parts.to_numpy(),
        prompt_template=app.template,
        stop_strings=app.stop_strings,
        max_tokens=app.max_tokens,
        record={**asdict(settings.schedule), **history},
        rank_statistics=rank_statistics(ranks),
    )


def _write(adapter: Adapter, base: BaseFolder, model: StreamModel, output: Path, golden: str) -> None:
    with folder_in_one_go(output) as folder:
        if adapter.config.lora_rank:
            save_lora(model.base, folder)
        write_speculative_files(adapter, base.architecture, folder)
        if golden:
            (folder / GOLDEN_PROMPTS).write_text(golden, encoding="utf-8")


def _compared(base: BaseFolder, settings: AdapterSettings, train, valid) -> dict:
    """Everything that a resumed run must have in common with the earlier one."""
    data, parts = hashlib.sha256(), hashlib.sha256()
    for document in [*train, *valid]:
        data.update(document.ids.tobytes() + repr(document.generated).encode())
    start = settings.start.tensors if settings.start is not None else {}
    initial = start | (settings.bigram_bias or {})
    for name in sorted(initial):
        parts.update(initial[name].tobytes())
    kept = {n: v for n, v in asdict(settings.schedule).items() if n != "checkpoint_minutes"}
    return {
        **settings.config.to_dict(),
        **kept,
        "base model": base.identity.sha256,
        "documents": len(train),
        "data": data.hexdigest(),
        "parts to start from": parts.hexdigest() if initial else None,
    }
