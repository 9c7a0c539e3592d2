"""The task metric of a base model or a plain LoRA: greedy batches, no speculation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ss_device.application import load_application
from ss_device.base_model import open_base
from ss_device.errors import library_errors
from ss_device.evaluation.prompts import fitting_prompts
from ss_device.evaluation.repetition import repeats
from ss_device.evaluation.stopping import text_before_stop
from ss_device.evaluation.task_scores import task_scores
from ss_device.reference.device import chosen_device
from ss_device.reference.stream_model import load_base
from ss_device.tokenizer_file import read_tokenizer
from ss_device.training.chat_template import with_tokenizer_template
from ss_device.training.continuations import Continuation, continuations
from ss_device.training.finetune import load_lora


def score_model(
    app_name: str,
    base_folder: Path,
    lora: Path | None,
    data: Path | str,
    limit: int,
    max_tokens: int | None = None,
    batch_size: int = 32,
    longest_prompt: int | None = None,
    report: Callable[[dict], None] = lambda record: None,
    device: str | None = None,
) -> dict:
    """Greedy float32 answers to `limit` prompts (those `evaluate` draws) and their metric.

    device: `cpu`, `cuda` or `mps` (None: what is there).
    """
    base = open_base(base_folder)
    app = with_tokenizer_template(load_application(app_name), base.path)
    tokenizer = read_tokenizer(base.path)
    shape, max_tokens = base.architecture, max_tokens or app.max_tokens
    tests = fitting_prompts(app, data, limit, tokenizer, shape, max_tokens, longest_prompt)
    prompts = tests.ids
    where = chosen_device(device)
    model = load_base(base, device=where) if lora is None else load_lora(base, lora, where)
    if lora is not None:
        with library_errors(f"{lora}: peft cannot run this LoRA"), torch.no_grad():
            model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=where), use_cache=False)
    settings = Continuation(max_tokens, stop_strings=app.stop_strings)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    texts, repeating = [""] * len(prompts), [False] * len(prompts)
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        made = continuations(model, tokenizer, [prompts[i] for i in batch], shape.eos_ids, settings)
        for index, ids in zip(batch, made, strict=True):
            texts[index] = text_before_stop(ids, tokenizer, app.stop_strings)
            repeating[index] = repeats(ids)
        report({"step": first + len(batch), "steps": len(order)})
    return {
        "app": app.name,
        "model": Path(lora or base_folder).name,
        "prompts": len(prompts),
        "left_out_too_long": tests.left_out,
        "repeating_texts": sum(repeating),
        **task_scores(app, texts, tests.questions),
    }
