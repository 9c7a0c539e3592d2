"""Pre-training of a small Llama base model from a recipe, resumable, on accelerate."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from ss_device.errors import UserError
from ss_device.training.batching import collate, plan_batches
from ss_device.training.checkpoint import load_checkpoint, save_checkpoint
from ss_device.training.copy_initialization import wire_copying
from ss_device.training.corpus import (
    BOS,
    EOS,
    PAD,
    Document,
    draw_documents,
    load_plan,
    save_plan,
)
from ss_device.training.log import open_log
from ss_device.training.recipe import Recipe, Schedule
from ss_device.training.tokenizer import train_tokenizer


def learning_rate(step: int, schedule: Schedule) -> float:
    """Linear warm-up, linear decay to zero at `steps`, and the cooldown on top when there is one."""
    if step < schedule.warmup_steps:
        return schedule.learning_rate * (step + 1) / schedule.warmup_steps
    done = (step - schedule.warmup_steps) / max(1, schedule.steps - schedule.warmup_steps)
    rate = schedule.learning_rate * (1 - min(1.0, done))
    if schedule.cooldown_steps and step >= schedule.cooldown_start:
        rate *= max(0.0, 1 - (step - schedule.cooldown_start) / schedule.cooldown_steps)
    return rate


def weighted_loss(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Next-token cross-entropy, mean over target weights. logits [B, T, V], ids and weights [B, T]."""
    losses = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
    )
    targets = weights[:, 1:].flatten()
    return (losses * targets).sum() / targets.sum().clamp(min=1.0)


def build_model(recipe: Recipe, tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A freshly initialised Llama of the recipe's shape (tied head), seeded by the recipe."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=recipe.vocab_size,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=tokenizer.token_to_id(PAD),
        **recipe.model,
    )
    model = LlamaForCausalLM(config)
    if recipe.schedule.copy_initialization:
        wire_copying(model, recipe.seed)
    return model


def started_model(recipe: Recipe, start: Path) -> LlamaForCausalLM:
    """The model in `start` in float32; UserError when its shape is not the recipe's."""
    if not (start / "config.json").is_file():
        raise UserError(f"{start}: no base model here (config.json is missing)")
    model = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    wanted = {"vocab_size": recipe.vocab_size, **recipe.model}
    for name, value in wanted.items():
        found = getattr(model.config, name)
        if found != value:
            raise UserError(f"{start}: {name} is {found}, the recipe says {value}")
    return model


def build_optimizer(model: torch.nn.Module, schedule: Schedule) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": schedule.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=schedule.learning_rate, betas=(0.9, 0.95), foreach=True)


def pretrain(
    recipe: Recipe,
    data: Path,
    output: Path,
    resume: bool = False,
    checkpoint_minutes: float = 5.0,
    report: Callable[[dict], None] = lambda record: None,
    start: Path | None = None,
    tokenizer_of: Path | None = None,
) -> None:
    """Train the recipe's base model and write a Hugging Face folder (fp16 safetensors) to `output`.

    Checkpoints and the log live in `<output>.run/`; `report` receives every log record
    (step, loss, lr, tokens, tokens/s, eta seconds). `start`: a Hugging Face folder of the recipe's
    shape whose weights and tokenizer are the starting point. tokenizer_of: a Hugging Face folder whose
    tokenizer is taken instead of training one, for a draft model, say. Raises UserError when one of
    them does not fit the recipe.
    """
    # Sharp attention makes denormal probabilities, which CPUs multiply very slowly. Set before the
    # first parallel operation: worker threads inherit it.
    torch.set_flush_denormal(True)
    run = output.with_name(output.name + ".run")
    if not resume:
        shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True, exist_ok=True)
    if start or tokenizer_of:
        _copy_tokenizer(start or tokenizer_of, recipe, run / "tokenizer")
    tokenizer = _tokenizer(recipe, data, run)
    documents, plan = _plan(recipe, data, tokenizer, run)
    batches = plan[: recipe.schedule.last_step]
    accelerator = Accelerator()
    model = build_model(recipe, tokenizer) if start is None else started_model(recipe, start)
    optimizer = build_optimizer(model, recipe.schedule)
    record = load_checkpoint(run / "checkpoint", model, optimizer) if resume else None
    model, optimizer = accelerator.prepare(model, optimizer)
    _run(
        accelerator,
        model,
        optimizer,
        recipe,
        documents,
        batches,
        run,
        record,
        checkpoint_minutes,
        report,
    )
    if accelerator.is_main_process:
        save_base(accelerator.unwrap_model(model), run / "tokenizer", output)


def _run(accelerator, model, optimizer, recipe, documents, batches, run, record, minutes, report) -> None:
    schedule = recipe.schedule
    first = record["step"] if record else 0
    tokens = record["tokens"] if record else 0
    log = open_log(run / "log.jsonl", first)
    started = saved = time.monotonic()
    seen, average = 0, record["loss"] if record else None
    for step in range(first, len(batches)):
        loss, size = train_step(
            accelerator, model, optimizer, [documents[i] for i in batches[step]], step, schedule
        )
        tokens, seen = tokens + size, seen + size
        average = loss if average is None else 0.98 * average + 0.02 * loss
        elapsed = time.monotonic() - started
        if (step + 1) % 10 == 0 or step + 1 == len(batches):
            line = {
                "step": step + 1,
                "steps": len(batches),
                "loss": round(average, 4),
                "lr": learning_rate(step, schedule),
                "tokens": tokens,
                "tokens_per_second": round(seen / elapsed),
                "eta": round(elapsed / (step + 1 - first) * (len(batches) - step - 1)),
            }
            log.write(json.dumps(line) + "\n")
            log.flush()
            report(line)
        if time.monotonic() - saved > 60 * minutes and accelerator.is_main_process:
            state = {"step": step + 1, "tokens": tokens, "loss": average}
            save_checkpoint(run / "checkpoint", accelerator.unwrap_model(model), optimizer, state)
            saved = time.monotonic()
    if accelerator.is_main_process:
        state = {"step": len(batches), "tokens": tokens, "loss": average}
        save_checkpoint(run / "checkpoint", accelerator.unwrap_model(model), optimizer, state)


def train_step(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    documents: list[Document],
    step: int,
    schedule: Schedule,
) -> tuple[float, int]:
    """One optimizer step on this process's share of `documents`; returns loss and tokens of all."""
    share = documents[accelerator.process_index :: accelerator.num_processes] or documents[:1]
    ids, weights = collate(share, 0, schedule.prompt_weight)
    ids, weights = (torch.from_numpy(a).to(accelerator.device) for a in (ids, weights))
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, schedule)
    with accelerator.autocast():
        logits = model(input_ids=ids, use_cache=False).logits
    loss = weighted_loss(logits, ids, weights)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()
    if not math.isfinite(value):
        raise FloatingPointError(f"loss is {value} at step {step + 1}; lower the learning rate")
    return value, sum(len(d.ids) for d in documents)


def _plan(
    recipe: Recipe, data: Path, tokenizer: Tokenizer, run: Path
) -> tuple[list[Document], list[list[int]]]:
    """The run's documents and batches; a resumed run reads those drawn at its start."""
    path = run / "plan.safetensors"
    if not path.is_file():
        rng = np.random.default_rng(recipe.seed)
        documents = draw_documents(recipe, data, tokenizer, rng)
        lengths = [len(d.ids) for d in documents]
        save_plan(documents, plan_batches(lengths, recipe.schedule.tokens_per_batch, rng), path)
    return load_plan(path)


def _tokenizer(recipe: Recipe, data: Path, run: Path) -> Tokenizer:
    folder = run / "tokenizer"
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    return train_tokenizer(recipe, data, folder)


def _copy_tokenizer(start: Path, recipe: Recipe, folder: Path) -> None:
    names = ("tokenizer.json", "tokenizer_config.json")
    for name in names:
        if not (start / name).is_file():
            raise UserError(f"{start}: {name} is missing")
    tokenizer = Tokenizer.from_file(str(start / names[0]))
    size = tokenizer.get_vocab_size()
    if size != recipe.vocab_size:
        raise UserError(f"{start}: the tokenizer has {size} tokens, the recipe says {recipe.vocab_size}")
    for token in (BOS, EOS, PAD):
        if tokenizer.token_to_id(token) is None:
            raise UserError(f"{start}: the tokenizer has no token '{token}'")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copy(start / name, folder / name)


def save_base(model: LlamaForCausalLM, tokenizer: Path, output: Path) -> None:
    """Write model (fp16) and tokenizer as one Hugging Face folder, renamed into place when whole."""
    temporary = output.with_name(output.name + ".partial")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(tokenizer, temporary)
    half = LlamaForCausalLM(model.config).to(torch.float16)
    half.load_state_dict(model.state_dict())
    half.save_pretrained(temporary, safe_serialization=True)
    shutil.rmtree(output, ignore_errors=True)
    temporary.rename(output)
