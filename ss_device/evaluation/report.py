"""One adapter, one set of prompts, one tree: tokens per call, acceptance, task metric, exactness."""

from __future__ import annotations

from pathlib import Path

from ss_device.adapter import load_adapter
from ss_device.application import load_application
from ss_device.base_model import open_base
from ss_device.config import parameter_count
from ss_device.decoding import Drafter
from ss_device.evaluation.acceptance import measure
from ss_device.evaluation.prompts import fitting_prompts
from ss_device.evaluation.repetition import repeats
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
    limit: int,
    num_nodes: int,
    num_kept: int | None,
    shape: str,
    tree_top_k: int,
    prune_over: str,
    max_tokens: int | None,
    app_name: str | None = None,
    longest_prompt: int | None = None,
    device: str | None = None,
) -> dict:
    """Decode `limit` rows of `data` on the float32 reference and report what happened.

    device: `cpu`, `cuda` or `mps` (None: what is there).

    Prompts are drawn with a fixed seed, so every adapter and tree sees the same ones; rows of the same
    prompt are one prompt with several references; prompts that do not fit (see `fitting_prompts`) are left
    out and counted. The metric comes with a 95 % bootstrap interval.
    """
    base, adapter = open_base(base_folder), load_adapter(adapter_folder)
    app = with_tokenizer_template(load_application(app_name or adapter.app), base.path)
    tokenizer = read_tokenizer(base.path)
    max_tokens = max_tokens or app.max_tokens
    tests = fitting_prompts(app, data, limit, tokenizer, base.architecture, max_tokens, longest_prompt)
    stream_model = load_stream_model(base, adapter, device=chosen_device(device))
    model = ReferenceStepModel(stream_model, num_nodes, num_kept or num_nodes, None, prune_over)
    drafter = Drafter(num_nodes, shape, tree_top_k, adapter.bigram_bias())
    stop_ids = frozenset(base.architecture.eos_ids)
    strings = app.stop_strings
    counts, outputs = measure(
        model, drafter, tests.ids, max_tokens, stop_ids,
        stopped=lambda ids: stop_length(ids, tokenizer, strings),
    )  # fmt: skip
    texts = [text_before_stop(ids, tokenizer, strings) for ids in outputs]
    return {
        "adapter": adapter.app,
        "tree": {
            "shape": shape,
            "nodes": num_nodes,
            "kept": num_kept or num_nodes,
            "tree_top_k": tree_top_k,
        },
        "left_out_too_long": tests.left_out,
        **counts.summary(),
        **task_scores(app, texts, tests.questions),
        "repeating_texts": sum(repeats(ids) for ids in outputs),
        "parameters": parameter_count(adapter.config, base.architecture),
    }
