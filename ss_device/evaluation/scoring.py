"""The task metric of a base model or a plain LoRA: greedy batches, no speculation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ss_device.application import load_application
from ss_device.base_model import BaseFolder, open_base
from ss_device.errors import library_errors
from ss_device.evaluation.prompts import fitting_prompts
from ss_device.evaluation.repetition import repeats
from ss_device.evaluation.settings import ScoreSettings
from ss_device.evaluation.stopping import text_before_stop
from ss_device.evaluation.task_scores import task_scores
from ss_device.reference.device import chosen_device
from ss_device.reference.stream_model import load_base
from ss_device.tokenizer_file import read_tokenizer
from ss_device.training.chat_template import with_tokenizer_template
from ss_device.training.continuations import continuations
from ss_device.training.finetune import load_lora
from ss_device.training.settings import Continuation


def score_model(
    app_name: str,
    base_folder: Path,
    data: Path | str,
    settings: ScoreSettings,
    report: Callable[[dict], None] = lambda record: None,
    device: str | None = None,
) -> dict:
    """Greedy float32 answers to the prompts that `evaluate` draws, and their metric.

    device: `cpu`, `cuda` or `mps` (None: what is there).
    """
    base = open_base(base_folder)
    app = with_tokenizer_template(load_application(app_name), base.path)
    tokenizer = read_tokenizer(base.path)
    tests = fitting_prompts(app, data, settings, tokenizer, base.architecture)
    model = _scored_model(base, settings.lora, device)
    how = Continuation(settings.longest_answer(app), stop_strings=app.stop_strings)
    prompts, ends = tests.ids, base.architecture.eos_ids
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    texts, repeating = [""] * len(prompts), [False] * len(prompts)
    for first in range(0, len(order), settings.batch_size):
        batch = order[first : first + settings.batch_size]
        made = continuations(model, tokenizer, [prompts[i] for i in batch], ends, how)
        for index, ids in zip(batch, made, strict=True):
            texts[index] = text_before_stop(ids, tokenizer, app.stop_strings)
            repeating[index] = repeats(ids)
        report({"step": first + len(batch), "steps": len(order)})
    return {
        "app": app.name,
        "model": Path(settings.lora or base_folder).name,
        "prompts": len(prompts),
        "left_out_too_long": tests.left_out,
        "repeating_texts": sum(repeating),
        **task_scores(app, texts, tests.questions),
    }


def _scored_model(base: BaseFolder, lora: Path | None, device: str | None) -> torch.nn.Module:
    """The base alone, or with a LoRA that peft has run once."""
    where = chosen_device(device)
    if lora is None:
        return load_base(base, device=where)
    model = load_lora(base, lora, where)
    with library_errors(f"{lora}: peft cannot run this LoRA"), torch.no_grad():
        model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=where), use_cache=False)
    return model
