"""Golden traces: what the PyTorch reference does on an application's prompts, recorded step by step.

This module needs no torch to be imported; `record_traces` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ss_convert.coreml.options import CoreMLOptions
from ss_device.adapter import Adapter
from ss_device.application import fill_template
from ss_device.base_model import BaseFolder
from ss_device.command_line import prompts_from_file
from ss_device.decoding import Choose, Drafter, Step, Verified, decode
from ss_device.errors import UserError
from ss_device.trace import Trace, TraceStep, load_traces, probes
from ss_device.tree import DraftTree

NUM_PROBES = 8
MAX_TOKENS = 64
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
    sizes: CoreMLOptions,
    weights: dict[str, np.ndarray] | None = None,
) -> list[Trace]:
    """Decode (text, token ids) prompts with the reference in float32 and record every model call.

    weights: canonical base weights to take in place of the base's (what a package stores); the
    adapter's tensors are then rounded to fp16 as they are there.
    Trees are best-first with the adapter's parent bias, N nodes, K kept; at most 64 tokens a prompt.
    """
    from ss_device.reference.replaced_weights import with_weights
    from ss_device.reference.step_model import ReferenceStepModel
    from ss_device.reference.stream_model import load_stream_model

    class Recording(ReferenceStepModel):
        """Remembers its last call: a `Proposal` alone has no main logits to take a margin from."""

        def step(self, tree: DraftTree, choose: Choose | None = None) -> Verified:
            self.last = super().step(tree, choose)
            return self.last

    if weights is None:
        stream_model = load_stream_model(base, adapter, "float32")
    else:
        stream_model = with_weights(base, weights, rounded(adapter))
    model = Recording(stream_model, sizes.num_nodes, sizes.num_kept, sizes.context, sizes.prune_over)
    drafter = Drafter(sizes.num_nodes, parent_bias=adapter.parent_bias())
    stop_ids = frozenset(base.architecture.eos_ids)
    max_tokens = min(adapter.max_tokens, MAX_TOKENS)
    traces = []
    for text, ids in prompts:
        decoded = decode(model, drafter, ids, max_tokens, stop_ids)
        prefill = next(decoded)
        first_margin = float(margins(model.last.logits)[0])
        traces.append(_trace(text, ids, [prefill, *decoded], first_margin))
    return traces


def rounded(adapter: Adapter) -> Adapter:
    """The adapter with every tensor rounded to fp16."""

    def half(array: np.ndarray) -> np.ndarray:
        return array.astype(np.float16).astype(np.float32)

    return replace(
        adapter,
        tensors={name: half(tensor) for name, tensor in adapter.tensors.items()},
        lora={name: (half(a), half(b)) for name, (a, b) in adapter.lora.items()},
    )


def margins(logits: np.ndarray) -> np.ndarray:
    """Largest minus second largest of each row: [K, V] → float32 [K]."""
    top = np.partition(logits.astype(np.float32), -2, axis=-1)[:, -2:]
    return top[:, 1] - top[:, 0]


def _trace(text: str, prompt: Sequence[int], steps: list[Step], first_margin: float) -> Trace:
    return Trace(
        text=text,
        prompt=tuple(int(i) for i in prompt),
        generated=tuple(int(i) for step in steps for i in step.tokens),
        first_margin=first_margin,
        steps=tuple(_trace_step(step) for step in steps if step.tree is not None),
    )


def _trace_step(step: Step) -> TraceStep:
    ids, values = probes(step.verified.stream_logits, NUM_PROBES)
    return TraceStep(
        tree=step.tree,
        kept=np.asarray(step.verified.kept, np.int32),
        chosen=np.asarray(step.verified.chosen, np.int32),
        margins=margins(step.verified.logits),
        path=step.path,
        probe_ids=ids,
        probe_logits=values,
    )
