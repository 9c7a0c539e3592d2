"""Golden traces: what the PyTorch reference does on an application's prompts, recorded step by step.

This module needs no torch to be imported; `record_traces` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ss_convert.graph.options import GraphOptions
from ss_device.adapter import Adapter
from ss_device.application import fill_template
from ss_device.base_model import BaseFolder
from ss_device.command_line import prompts_from_file
from ss_device.decoding import Drafter
from ss_device.errors import UserError
from ss_device.trace import TRACED_TOKENS, Recorded, Trace, load_traces

MAX_PROMPTS = 16
PROMPT_FILE = "golden_prompts.jsonl"
TRACE_STEM = "golden"


def reference_available() -> bool:
    """Whether the reference's libraries are installed."""
    return all(find_spec(name) for name in ("torch", "transformers", "tokenizers"))


def traces_of_folder(folder: Path, num_nodes: int, num_kept: int) -> list[Trace] | None:
    """Traces that came with an adapter folder; None if there are none or they do not fit N and K.

    They were recorded without pruning, so a package that prunes keeps other nodes.
    """
    if not (folder / f"{TRACE_STEM}.json").is_file():
        return None
    traces = load_traces(folder / TRACE_STEM)
    largest = max((s.tree.num_nodes for t in traces for s in t.steps), default=1)
    return traces if largest <= num_nodes and num_kept == num_nodes else None


def read_prompts(
    path: Path, adapter: Adapter, base: BaseFolder, context: int
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Text and token ids of a file's prompts; rows carry `prompt` or the application's fields.

    Raises UserError for a row without them and for a prompt that context or vocabulary do not hold.
    """
    from ss_device.tokenizer_file import read_tokenizer
    from ss_runtime.tokenization import BundleTokenizer

    template, app = adapter.prompt_template, adapter.app
    rows = prompts_from_file(
        path,
        lambda row: row["prompt"] if "prompt" in row else fill_template(template, row, app),
        MAX_PROMPTS,
    )
    shape = base.architecture
    tokenizer = BundleTokenizer(read_tokenizer(base.path), shape.bos_id, shape.vocab_size)
    prompts = []
    for index, (_, text) in enumerate(rows, 1):
        try:
            ids = tokenizer.encode(text)
        except UserError as error:
            raise UserError(f"{path}: prompt {index}: {error}") from error
        if not 0 < len(ids) <= context:
            raise UserError(f"{path}: prompt {index} has {len(ids)} tokens, the context holds {context}")
        prompts.append((text, tuple(ids)))
    return tuple(prompts)


def record_traces(
    base: BaseFolder,
    adapter: Adapter,
    prompts: Sequence[tuple[str, Sequence[int]]],
    sizes: GraphOptions,
    weights: dict[str, np.ndarray] | None = None,
    device: str | None = None,
) -> tuple[list[Trace], Recorded]:
    """Decode (text, token ids) prompts with the reference in float32 and record every model call.

    weights: canonical base weights to take in place of the base's (what a package stores); the
    adapter's tensors are then rounded to fp16 as they are there. device: `cpu`, `cuda` or `mps` (None:
    what is there). Trees are best-first with the adapter's bigram bias, N nodes, K kept; at most 64 tokens
    a prompt. Returns the traces and where they were made.
    """
    from ss_device.reference import recording
    from ss_device.reference.device import chosen_device
    from ss_device.reference.replaced_weights import with_weights
    from ss_device.reference.step_model import ReferenceStepModel
    from ss_device.reference.stream_model import load_stream_model

    where = chosen_device(device)
    if weights is None:
        stream_model = load_stream_model(base, adapter, "float32", where)
    else:
        stream_model = with_weights(base, weights, rounded(adapter), where)
    options = (sizes.num_nodes, sizes.num_kept, sizes.context, sizes.prune_over)
    model = ReferenceStepModel(stream_model, *options)
    drafter = Drafter(sizes.num_nodes, bigram_bias=adapter.bigram_bias())
    max_tokens = min(adapter.max_tokens, TRACED_TOKENS)
    traces = recording.record_traces(model, drafter, prompts, max_tokens)
    return traces, replace(recording.recorded_on(model), base=base.identity.sha256)


def check_device(device: str | None) -> None:
    """Raise UserError for a device that PyTorch does not find here, or without PyTorch."""
    if device is None:
        return
    if not reference_available():
        raise UserError("--device is for recording golden traces, and PyTorch is not installed")
    from ss_device.reference.device import chosen_device

    chosen_device(device)


def rounded(adapter: Adapter) -> Adapter:
    """The adapter with every tensor rounded to fp16."""

    def half(array: np.ndarray) -> np.ndarray:
        return array.astype(np.float16).astype(np.float32)

    return replace(
        adapter,
        tensors={name: half(tensor) for name, tensor in adapter.tensors.items()},
        lora={name: (half(a), half(b)) for name, (a, b) in adapter.lora.items()},
    )
