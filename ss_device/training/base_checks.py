"""What held-out rows say of a base model while it is trained: loss, task metric, looping texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional

from ss_device.application import Application, load_application
from ss_device.evaluation.prompts import Question, load_test_prompts
from ss_device.evaluation.repetition import repeats
from ss_device.evaluation.stopping import text_before_stop
from ss_device.evaluation.task_scores import task_scores
from ss_device.training.batching import collate, plan_batches
from ss_device.training.continuations import Continuation, continuations
from ss_device.training.corpus import BOS, EOS, Document
from ss_device.training.recipe import Check, Recipe

LOSS_TOKENS = 4096
"""Tokens per batch of the loss."""


@dataclass(frozen=True)
class CheckedApplication:
    """An application's held-out prompts with their ids, and its first rows as documents."""

    app: Application
    questions: list[Question]
    prompts: list[list[int]]
    max_tokens: int
    documents: list[Document]


class BaseChecks:
    """The checks of a recipe, read once; `measure` takes seconds for a small model on a CPU."""

    def __init__(self, recipe: Recipe, data: Path, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.token_to_id(EOS)
        self.applications = [_open_check(check, data, tokenizer) for check in recipe.checks]

    @torch.no_grad()
    def measure(self, model: torch.nn.Module, device: torch.device) -> dict:
        """By application: loss per generated token, its metric, `looping`: the share of repeating texts."""
        training, attention = model.training, model.config._attn_implementation
        model.eval()
        model.set_attn_implementation("sdpa")  # generation keeps a cache and pads on the left
        try:
            return {c.app.name: self._measure_one(c, model, device) for c in self.applications}
        finally:
            model.set_attn_implementation(attention)
            model.train(training)

    def _measure_one(self, check: CheckedApplication, model: torch.nn.Module, device: torch.device) -> dict:
        settings = Continuation(check.max_tokens, stop_strings=check.app.stop_strings)
        made = continuations(model, self.tokenizer, check.prompts, [self.end], settings)
        texts = [text_before_stop(ids, self.tokenizer, check.app.stop_strings) for ids in made]
        metric = task_scores(check.app, texts, check.questions)
        return {
            "loss": round(_mean_loss(model, check.documents, device), 4),
            **{name: value for name, value in metric.items() if not name.endswith("_interval")},
            "looping": round(float(np.mean([repeats(ids) for ids in made])), 3),
        }


def _open_check(check: Check, data: Path, tokenizer: Tokenizer) -> CheckedApplication:
    app, bos, end = load_application(check.app), tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    questions, prompts, documents = [], [], []
    for question in load_test_prompts(app, data / check.path, 4 * check.prompts):
        ids = [bos, *tokenizer.encode(question.text, add_special_tokens=False).ids]
        completion = tokenizer.encode(app.completion_text(question.row), add_special_tokens=False).ids
        if len(ids) + len(completion) < check.max_length and len(questions) < check.prompts:
            questions.append(question)
            prompts.append(ids)
            documents.append(Document(np.array([*ids, *completion, end], np.int32), len(ids)))
    return CheckedApplication(app, questions, prompts, check.max_tokens or app.max_tokens, documents)


def _mean_loss(model: torch.nn.Module, documents: list[Document], device: torch.device) -> float:
    """Mean cross-entropy of generated tokens, in nats."""
    total = count = 0.0
    lengths = [len(d.ids) for d in documents]
    for batch in plan_batches(lengths, LOSS_TOKENS, np.random.default_rng(0)):
        ids, weights = (torch.from_numpy(a) for a in collate([documents[i] for i in batch], 0, 0.0))
        ids, weights = ids.to(device), weights[:, 1:].to(device)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        flat, targets = logits.flatten(0, 1).float(), ids[:, 1:].flatten()
        losses = functional.cross_entropy(flat, targets, reduction="none")
        total += float((losses * weights.flatten()).sum())
        count += float(weights.sum())
    return total / max(1.0, count)
