"""Tokens per call of one adapter under many trees, replayed over the model's own continuations."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ss_device.adapter import Adapter, load_adapter
from ss_device.application import load_application
from ss_device.base_model import open_base
from ss_device.config import parameter_count
from ss_device.evaluation.acceptance import AcceptanceCounts
from ss_device.evaluation.prompts import fitting_prompts
from ss_device.evaluation.repetition import repeats
from ss_device.evaluation.replay import replay_continuations
from ss_device.evaluation.settings import ReplaySettings
from ss_device.evaluation.stopping import text_before_stop
from ss_device.evaluation.task_scores import task_scores
from ss_device.json_lines import read_json_lines
from ss_device.reference.device import chosen_device
from ss_device.reference.replaced_weights import with_weights
from ss_device.reference.stream_model import StreamModel, load_stream_model
from ss_device.tokenizer_file import read_tokenizer
from ss_device.training.chat_template import with_tokenizer_template
from ss_device.training.distill import Prompt, distill
from ss_device.training.settings import DistillSettings


def replay_adapter(
    adapter_folder: Path,
    base_folder: Path,
    data: Path | str,
    continuations: Path,
    settings: ReplaySettings,
    weights: Mapping[str, np.ndarray] | None = None,
    report: Callable[[dict], None] = lambda record: None,
    device: str | None = None,
) -> dict:
    """Acceptance of an adapter on prompts of `data` for every tree (`replay_continuations`); the metric.

    The prompts are those that `evaluate` draws. `continuations`: JSON lines of the model's own text,
    made here where prompts are missing; every lossless adapter of a base shares them. Prompts of more
    than `longest_prompt` tokens (default: what leaves room for the answer in the context) are left
    out and counted. weights: canonical ones in place of the base's. device: `cpu`, `cuda` or `mps` (None:
    what is there).
    """
    base, adapter = open_base(base_folder), load_adapter(adapter_folder)
    app = with_tokenizer_template(load_application(adapter.app), base.path)
    tokenizer, shape = read_tokenizer(base.path), base.architecture
    tests = fitting_prompts(app, data, settings, tokenizer, shape)
    model = _replayed_model(base, adapter, weights, device)
    longest = settings.longest_answer(app)
    how = DistillSettings(longest, stop_strings=app.stop_strings)
    made_from = _made_from(adapter, weights)
    outputs = _own_texts(model, tokenizer, tests, continuations, how, made_from, report)
    drafters, ends = [t.drafter(adapter.bigram_bias()) for t in settings.trees], frozenset(shape.eos_ids)
    counts = replay_continuations(
        model, drafters, tests.ids, outputs, ends, longest,
        report=lambda done, total: report({"step": done, "steps": total}),
    )  # fmt: skip
    texts = [text_before_stop(ids, tokenizer, app.stop_strings) for ids in outputs]
    loops = [repeats(ids) for ids in outputs]
    return {
        "app": app.name,
        "adapter": adapter_folder.name,
        "left_out_too_long": tests.left_out,
        **task_scores(app, texts, tests.questions),
        "parameters": parameter_count(adapter.config, shape),
        "repeating_texts": sum(loops),
        "trees": {str(t): _summary(c, loops) for t, c in zip(settings.trees, counts, strict=True)},
    }


def _replayed_model(base, adapter, weights, device: str | None) -> StreamModel:
    where = chosen_device(device)
    if weights is None:
        return load_stream_model(base, adapter, device=where)
    return with_weights(base, weights, adapter, where)


def _summary(counts: Sequence[AcceptanceCounts], loops: Sequence[bool]) -> dict:
    """All prompts together, and the tokens per call of those whose text does not repeat itself."""
    everything, plain = AcceptanceCounts(), AcceptanceCounts()
    for count, loop in zip(counts, loops, strict=True):
        everything.merge(count)
        if not loop:
            plain.merge(count)
    without = {"prompts": plain.prompts, "tokens_per_call": plain.summary()["tokens_per_call"]}
    return {**everything.summary(), "without_repetition": without}


def _made_from(adapter: Adapter, weights: Mapping[str, np.ndarray] | None) -> dict:
    """What decides the model's own text: application, base, other weights, and LoRA (shared mode)."""
    made_from: dict = {"app": adapter.app, "base": adapter.base.to_dict()}
    if weights is not None:
        made_from["weights"] = _digest(weights[name] for name in sorted(weights))
    if adapter.lora:
        made_from["lora"] = _digest(f for name in sorted(adapter.lora) for f in adapter.lora[name])
    return made_from


def _digest(arrays: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()


def _own_texts(model, tokenizer, tests, path, settings, made_from, report) -> list[list[int]]:
    """The model's own greedy continuations of test prompts, kept in the file `path`."""
    asked = [Prompt(tuple(ids), q.text) for q, ids in zip(tests.questions, tests.ids, strict=True)]
    ends = model.architecture.eos_ids
    distill(model.base, tokenizer, asked, path, ends, settings, made_from, report)
    own = {row["prompt"]: row["completion_ids"] for row in read_json_lines(path)}
    return [own[question.text] for question in tests.questions]
