"""One adapter, one set of prompts, one tree: tokens per call, acceptance, task metric, exactness."""

from __future__ import annotations

from pathlib import Path

from ss_device.adapter import Adapter, load_adapter
from ss_device.application import load_application
from ss_device.base_model import BaseFolder, open_base
from ss_device.config import parameter_count
from ss_device.decoding import Drafter
from ss_device.evaluation.acceptance import measure
from ss_device.evaluation.prompts import fitting_prompts
from ss_device.evaluation.repetition import repeats
from ss_device.evaluation.settings import EvaluationSettings
from ss_device.evaluation.stopping import stop_length, text_before_stop
from ss_device.evaluation.task_scores import task_scores
from ss_device.reference.device import chosen_device
from ss_device.reference.step_model import ReferenceStepModel
from ss_device.reference.stream_model import load_stream_model
from ss_device.tokenizer_file import read_tokenizer
from ss_device.training.chat_template import with_tokenizer_template


def evaluate_adapter(
    adapter_folder: Path,
    base_folder: Path,
    data: Path | str,
    settings: EvaluationSettings,
    device: str | None = None,
) -> dict:
    """Decode rows of `data` on the float32 reference and report what happened.

    device: `cpu`, `cuda` or `mps` (None: what is there).

    Prompts are drawn with a fixed seed, so every adapter and tree sees the same ones; rows of the same
    prompt are one prompt with several references; prompts that do not fit (see `fitting_prompts`) are left
    out and counted. The metric comes with a 95 % bootstrap interval.
    """
    base, adapter = open_base(base_folder), load_adapter(adapter_folder)
    app = with_tokenizer_template(load_application(settings.app or adapter.app), base.path)
    tokenizer = read_tokenizer(base.path)
    tests = fitting_prompts(app, data, settings, tokenizer, base.architecture)
    model, drafter = _model_and_drafter(base, adapter, settings, device)
    counts, outputs = measure(
        model, drafter, tests.ids, settings.longest_answer(app), frozenset(base.architecture.eos_ids),
        stopped=lambda ids: stop_length(ids, tokenizer, app.stop_strings),
    )  # fmt: skip
    texts = [text_before_stop(ids, tokenizer, app.stop_strings) for ids in outputs]
    return {
        "adapter": adapter.app,
        "tree": {
            "shape": settings.shape,
            "nodes": settings.num_nodes,
            "kept": settings.num_kept or settings.num_nodes,
            "tree_top_k": settings.tree_top_k,
        },
        "left_out_too_long": tests.left_out,
        **counts.summary(),
        **task_scores(app, texts, tests.questions),
        "repeating_texts": sum(repeats(ids) for ids in outputs),
        "parameters": parameter_count(adapter.config, base.architecture),
    }


def _model_and_drafter(
    base: BaseFolder, adapter: Adapter, settings: EvaluationSettings, device: str | None
) -> tuple[ReferenceStepModel, Drafter]:
    nodes = settings.num_nodes
    stream_model = load_stream_model(base, adapter, device=chosen_device(device))
    model = ReferenceStepModel(stream_model, nodes, settings.num_kept or nodes, None, settings.prune_over)
    return model, Drafter(nodes, settings.shape, settings.tree_top_k, adapter.bigram_bias())
