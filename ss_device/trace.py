"""Golden traces: what the reference did, step by step, for other back ends to replay.

Per prompt: its tokens, the generated tokens, and for every model call after prefill the tree, the kept
nodes, the chosen tokens with their top-1/top-2 margins, the accepted path, and probe logits (the
values of a few vocabulary ids for each stream of the accepted node).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from safetensors.numpy import save

from ss_device.acceptance import walk
from ss_device.errors import UserError, one_line
from ss_device.files import read_tensors
from ss_device.strict_json import read_json
from ss_device.token_ids import check_token_ids
from ss_device.tree import DraftTree, tree_from_parents

FORMAT_VERSION = 1
TRACED_TOKENS = 64  # of a prompt's generation at most


@dataclass(frozen=True)
class TraceStep:
    """One recorded model call. kept, chosen int32 [K']; margins float32 [K']; probe_ids int32
    [γ, P], probe_logits float32 [γ, P]: the accepted node's stream logits at those ids."""

    tree: DraftTree
    kept: np.ndarray
    chosen: np.ndarray
    margins: np.ndarray
    path: tuple[int, ...]
    probe_ids: np.ndarray
    probe_logits: np.ndarray


@dataclass(frozen=True)
class Trace:
    """One prompt's generation. `first` is the prefill's token with its margin and probes."""

    text: str
    prompt: tuple[int, ...]
    generated: tuple[int, ...]
    first_margin: float
    steps: tuple[TraceStep, ...]


@dataclass(frozen=True)
class Recorded:
    """Where traces were made, and of what.

    device: as `cuda (NVIDIA L4)`; dtype: what it computed in; machine: system and processor; versions by
    library; base: sha256 of the base model; weights: of a bundle's adapter and base as they were read
    (`Bundle.weights_digest`), empty for the traces inside a bundle.
    """

    device: str
    dtype: str
    machine: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    base: str = ""
    weights: str = ""


def probes(stream_logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` largest logits of each stream [γ, V] → ids and values [γ, count]."""
    ids = np.argsort(-stream_logits, axis=-1, kind="stable")[:, :count].astype(np.int32)
    return ids, np.take_along_axis(stream_logits, ids, axis=-1).astype(np.float32)


def save_traces(traces: list[Trace], stem: Path, recorded: Recorded | None = None) -> None:
    """Write `<stem>.safetensors` (arrays, steps concatenated) and `<stem>.json` (texts, counts, origin)."""
    steps = [s for t in traces for s in t.steps]
    arrays = {
        "prompts": _join([np.array(t.prompt) for t in traces]),
        "generated": _join([np.array(t.generated) for t in traces]),
        "tree_tokens": _join([s.tree.tokens for s in steps]),
        "tree_parents": _join([s.tree.parents for s in steps]),
        "kept": _join([s.kept for s in steps]),
        "chosen": _join([s.chosen for s in steps]),
        "paths": _join([np.array(s.path) for s in steps]),
        "margins": _join([s.margins for s in steps], np.float32),
        "probe_ids": _stack([s.probe_ids for s in steps], np.int32),
        "probe_logits": _stack([s.probe_logits for s in steps], np.float32),
    }
    counts = {
        "format_version": FORMAT_VERSION,
        "recorded": recorded and asdict(recorded),
        "prompts": [
            {
                "text": t.text,
                "prompt_tokens": len(t.prompt),
                "generated_tokens": len(t.generated),
                "first_margin": float(t.first_margin),
                "steps": len(t.steps),
            }
            for t in traces
        ],
        "steps": [{"nodes": s.tree.num_nodes, "kept": len(s.kept), "path": len(s.path)} for s in steps],
    }
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".safetensors").write_bytes(save(arrays))
    stem.with_suffix(".json").write_text(json.dumps(counts) + "\n")


def _join(arrays: list[np.ndarray], dtype=np.int32) -> np.ndarray:
    return np.concatenate([np.asarray(a, dtype) for a in arrays] or [np.zeros(0, dtype)])


def _stack(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    """[steps, γ, P]; where every prompt's first token ends its text there are no steps."""
    return np.stack(arrays).astype(dtype) if arrays else np.zeros((0, 0, 0), dtype)


def load_traces(stem: Path, vocab_size: int | None = None) -> list[Trace]:
    """Read what `save_traces` wrote.

    vocab_size: of the model that is to replay them, which no token id may exceed. Raises UserError for a
    newer file and for one whose arrays, counts and generations do not fit each other.
    """
    counts = _read_counts(stem.with_suffix(".json"))
    arrays = _Columns(stem.with_suffix(".safetensors"), counts)
    traces = []
    for number, entry in enumerate(counts.prompts):
        try:
            trace = _next_trace(arrays, entry)
            _check_generation(trace)
            if vocab_size is not None:
                _check_ids(trace, vocab_size)
        except (ValueError, UserError) as error:
            raise UserError(f"{stem}: golden prompt {number}: {one_line(error)}") from error
        traces.append(trace)
    return traces


def trace_record(stem: Path) -> Recorded | None:
    """Where the traces of a file were made; None where it does not say. UserError for a damaged file."""
    return _read_counts(stem.with_suffix(".json")).recorded


class _StepCounts(msgspec.Struct):
    nodes: Annotated[int, msgspec.Meta(ge=1)]
    kept: Annotated[int, msgspec.Meta(ge=1)]
    path: Annotated[int, msgspec.Meta(ge=1)]


class _PromptCounts(msgspec.Struct):
    text: str
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1)]
    generated_tokens: Annotated[int, msgspec.Meta(ge=1)]
    first_margin: Annotated[float, msgspec.Meta(ge=0)]
    steps: Annotated[int, msgspec.Meta(ge=0)]


class _Counts(msgspec.Struct):
    """The JSON file: how the arrays divide into prompts and steps."""

    prompts: list[_PromptCounts]
    steps: list[_StepCounts]
    recorded: Recorded | None = None


def _read_counts(path: Path) -> _Counts:
    raw = read_json(path)
    if raw.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{path}: trace format version {raw.get('format_version')}, this program reads {FORMAT_VERSION}"
        )
    try:
        counts = msgspec.convert(raw, _Counts)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {one_line(error)}") from error
    if not counts.prompts:
        raise UserError(f"{path}: no golden prompts, so nothing to replay")
    if (
        counts.recorded is not None
        and not json.dumps(asdict(counts.recorded), ensure_ascii=False).isprintable()
    ):
        raise UserError(f"{path}: 'recorded' holds characters that cannot be printed")
    if (steps := sum(p.steps for p in counts.prompts)) != len(counts.steps):
        raise UserError(f"{path}: its prompts have {steps} steps, {len(counts.steps)} are described")
    return counts


class _Columns:
    """The arrays of a trace file, handed out from the front. UserError where they are not as counted."""

    def __init__(self, path: Path, counts: _Counts) -> None:
        self._arrays, self._path = read_tensors(path), path
        self._counts, self._taken, self._step = counts, {}, 0
        steps, prompts = counts.steps, counts.prompts
        nodes, kept = sum(s.nodes for s in steps), sum(s.kept for s in steps)
        self._check("prompts", np.int32, (sum(p.prompt_tokens for p in prompts),))
        self._check("generated", np.int32, (sum(p.generated_tokens for p in prompts),))
        for name in ("tree_tokens", "tree_parents"):
            self._check(name, np.int32, (nodes,))
        for name, dtype in (("kept", np.int32), ("chosen", np.int32), ("margins", np.float32)):
            self._check(name, dtype, (kept,))
        self._check("paths", np.int32, (sum(s.path for s in steps),))
        for name, dtype in (("probe_ids", np.int32), ("probe_logits", np.float32)):
            self._check(name, dtype, (len(steps), *self._probes_shape()))
        if not np.isfinite(self._arrays["probe_logits"]).all():
            raise UserError(f"{path}: 'probe_logits' has values that are not finite")
        if not (self._arrays["margins"] >= 0).all() or not np.isfinite(self._arrays["margins"]).all():
            raise UserError(f"{path}: 'margins' has values that are negative or not finite")

    def _probes_shape(self) -> tuple[int, ...]:
        """(γ, P) as the file has it, at least one of each: without probes no logit would be compared."""
        shape = self._arrays["probe_ids"].shape[1:] if "probe_ids" in self._arrays else (0, 0)
        if len(shape) != 2 or (self._counts.steps and 0 in shape):
            raise UserError(f"{self._path}: 'probe_ids' has no ids")
        return shape

    def _check(self, name: str, dtype: type, shape: tuple[int, ...]) -> None:
        array = self._arrays.get(name)
        if array is None or array.dtype != dtype or array.shape != shape:
            found = "missing" if array is None else f"{array.dtype} {list(array.shape)}"
            expected = f"{np.dtype(dtype)} {list(shape)}"
            raise UserError(f"{self._path}: '{name}' is {found}, expected {expected}")

    def take(self, name: str, count: int) -> np.ndarray:
        """The next `count` values of an array."""
        start = self._taken.get(name, 0)
        self._taken[name] = start + count
        return self._arrays[name][start : start + count]

    def next_step(self) -> TraceStep:
        index, self._step = self._step, self._step + 1
        sizes = self._counts.steps[index]
        tokens, parents = (self.take(name, sizes.nodes) for name in ("tree_tokens", "tree_parents"))
        return TraceStep(
            tree=tree_from_parents(tokens, parents),
            kept=self.take("kept", sizes.kept),
            chosen=self.take("chosen", sizes.kept),
            margins=self.take("margins", sizes.kept),
            path=tuple(int(n) for n in self.take("paths", sizes.path)),
            probe_ids=self._arrays["probe_ids"][index],
            probe_logits=self._arrays["probe_logits"][index],
        )


def _next_trace(arrays: _Columns, entry: _PromptCounts) -> Trace:
    return Trace(
        text=entry.text,
        prompt=tuple(int(i) for i in arrays.take("prompts", entry.prompt_tokens)),
        generated=tuple(int(i) for i in arrays.take("generated", entry.generated_tokens)),
        first_margin=entry.first_margin,
        steps=tuple(arrays.next_step() for _ in range(entry.steps)),
    )


def _check_generation(trace: Trace) -> None:
    """Raise ValueError unless every step goes on where the one before ended, up to the recorded text."""
    if not np.isfinite(trace.first_margin):
        raise ValueError(f"first_margin {trace.first_margin} is not finite")
    text, before = [trace.generated[0]], 0
    for number, step in enumerate(trace.steps, 1):
        nodes = np.arange(step.tree.num_nodes)
        if np.any(np.diff(step.kept) <= 0) or not np.isin(step.kept, nodes).all():
            raise ValueError(f"step {number}: the kept nodes are not ascending nodes of its tree")
        if step.tree.tokens[0] != text[-1]:
            raise ValueError(f"step {number}: its tree does not begin with the token before")
        if 0 not in step.kept or list(step.path) != walk(step.tree, step.kept, step.chosen):
            raise ValueError(f"step {number}: the accepted path is not where the chosen tokens lead")
        before = len(text)
        correction = step.chosen[np.searchsorted(step.kept, step.path[-1])]
        text += [int(step.tree.tokens[n]) for n in step.path[1:]] + [int(correction)]
    # The last step's tokens end with a stop token or the token limit.
    length = len(trace.generated)
    if not before < length <= len(text) or list(trace.generated) != text[:length]:
        raise ValueError("its steps do not make up the generated text")


def _check_ids(trace: Trace, vocab_size: int) -> None:
    """Raise UserError for a token id that the model does not have."""
    check_token_ids(trace.prompt, vocab_size, "its prompt")
    check_token_ids(trace.generated, vocab_size, "its generated text")
    for number, step in enumerate(trace.steps, 1):
        check_token_ids(step.tree.tokens, vocab_size, f"the tree of step {number}")
        check_token_ids(step.chosen, vocab_size, f"the chosen tokens of step {number}")
        check_token_ids(step.probe_ids.reshape(-1), vocab_size, f"the probes of step {number}")
