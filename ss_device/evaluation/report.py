"""One adapter, one set of prompts, one tree: tokens per call, acceptance, task metric, exactness."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from ss_device.adapter import load_adapter
from ss_device.application import load_application
from ss_device.base_model import open_base
from ss_device.config import parameter_count
from ss_device.decoding import Drafter
from ss_device.evaluation.acceptance import measure
from ss_device.evaluation.metrics import metric
from ss_device.reference.step_model import ReferenceStepModel
from ss_device.reference.stream_model import load_stream_model
from ss_device.training.examples import load_prompts


def evaluate_adapter(
    adapter_folder: Path,
    base_folder: Path,
    data: Path,
    limit: int,
    num_nodes: int,
    num_kept: int | None,
    shape: str,
    top_k: int,
    prune_over: str,
    max_tokens: int | None,
) -> dict:
    """Decode `limit` rows of `data` on the float32 reference and report what happened.

    Rows are drawn with a fixed seed, so every adapter and tree sees the same prompts.
    """
    base, adapter = open_base(base_folder), load_adapter(adapter_folder)
    app = load_application(adapter.app)
    tokenizer = Tokenizer.from_file(str(base_folder / "tokenizer.json"))
    start = [] if base.architecture.bos_id is None else [base.architecture.bos_id]
    pairs = load_prompts(app, data, limit, seed=0)
    prompts = [start + tokenizer.encode(p, add_special_tokens=False).ids for p, _ in pairs]
    model = ReferenceStepModel(
        load_stream_model(base, adapter), num_nodes, num_kept or num_nodes, None, prune_over
    )
    drafter = Drafter(num_nodes, shape, top_k, adapter.parent_bias())
    stop_ids = frozenset(base.architecture.eos_ids)
    counts, outputs = measure(model, drafter, prompts, max_tokens or app.max_tokens, stop_ids)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in outputs]
    references = [row[app.reference] for _, row in pairs]
    return {
        "adapter": adapter.app,
        "tree": {"shape": shape, "nodes": num_nodes, "kept": num_kept or num_nodes, "top_k": top_k},
        **counts.summary(),
        app.metric: round(metric(app.metric)(texts, references), 4),
        "parameters": parameter_count(adapter.config, base.architecture),
    }
