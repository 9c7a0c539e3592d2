"""Golden traces: what the reference does on prompts, recorded call by call (`ss_device.trace`)."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version

import numpy as np
import torch
import transformers

from ss_device.command_line import program_version
from ss_device.decoding import Drafter, Step, decode
from ss_device.reference.device import device_text
from ss_device.reference.step_model import ReferenceStepModel
from ss_device.trace import Recorded, Trace, TraceStep, probes

NUM_PROBES = 8


def record_traces(
    model: ReferenceStepModel,
    drafter: Drafter,
    prompts: Iterable[tuple[str, Sequence[int]]],
    max_tokens: int,
    advance: Callable[[], None] = lambda: None,
) -> list[Trace]:
    """Decode (text, token ids) prompts greedily; every model call of each. advance: called after each."""
    stop_ids, traces = frozenset(model.model.architecture.eos_ids), []
    for text, ids in prompts:
        decoded = decode(model, drafter, ids, max_tokens, stop_ids)
        prefill = next(decoded)
        first_margin = float(margins(model.last.logits)[0])
        traces.append(_trace(text, ids, [prefill, *decoded], first_margin))
        advance()
    return traces


def recorded_on(model: ReferenceStepModel) -> Recorded:
    """Device, dtype and versions of a model's traces."""
    first = next(model.model.parameters())
    return Recorded(
        device=device_text(first.device),
        dtype=str(first.dtype).removeprefix("torch."),
        machine=f"{platform.system()} {platform.machine()}",
        versions={
            "ss-device": program_version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": version("numpy"),
        },
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
