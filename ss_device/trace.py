"""Golden traces: what the reference did, step by step, for other back ends to replay.

Per prompt: its tokens, the generated tokens, and for every model call after prefill the tree, the kept
nodes, the chosen tokens with their top-1/top-2 margins, the accepted path, and probe logits (the
values of a few vocabulary ids for each stream of the accepted node).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ss_device.errors import UserError
from ss_device.files import read_tensors
from ss_device.strict_json import read_json
from ss_device.tree import DraftTree, tree_from_parents

FORMAT_VERSION = 1


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


def probes(stream_logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` largest logits of each stream [γ, V] → ids and values [γ, count]."""
    ids = np.argsort(-stream_logits, axis=-1, kind="stable")[:, :count].astype(np.int32)
    return ids, np.take_along_axis(stream_logits, ids, axis=-1).astype(np.float32)


def save_traces(traces: list[Trace], stem: Path) -> None:
    """Write `<stem>.safetensors` (arrays, steps concatenated) and `<stem>.json` (texts, counts)."""
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
        "probe_ids": np.stack([s.probe_ids for s in steps]).astype(np.int32),
        "probe_logits": np.stack([s.probe_logits for s in steps]).astype(np.float32),
    }
    counts = {
        "format_version": FORMAT_VERSION,
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
    save_file(arrays, stem.with_suffix(".safetensors"))
    stem.with_suffix(".json").write_text(json.dumps(counts) + "\n")


def _join(arrays: list[np.ndarray], dtype=np.int32) -> np.ndarray:
    return np.concatenate([np.asarray(a, dtype) for a in arrays] or [np.zeros(0, dtype)])


def load_traces(stem: Path) -> list[Trace]:
    """Read what `save_traces` wrote. A damaged or newer file is a UserError."""
    counts = read_json(stem.with_suffix(".json"))
    if counts.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{stem}.json: trace format version {counts.get('format_version')}, "
            f"this program reads {FORMAT_VERSION}"
        )
    arrays = read_tensors(stem.with_suffix(".safetensors"))
    taken: dict[str, int] = {}

    def take(name: str, count: int) -> np.ndarray:
        start = taken.get(name, 0)
        taken[name] = start + count
        return arrays[name][start : start + count]

    traces, index = [], 0
    for entry in counts["prompts"]:
        steps = []
        for _ in range(entry["steps"]):
            sizes = counts["steps"][index]
            tree = tree_from_parents(
                take("tree_tokens", sizes["nodes"]), take("tree_parents", sizes["nodes"])
            )
            steps.append(
                TraceStep(
                    tree=tree,
                    kept=take("kept", sizes["kept"]),
                    chosen=take("chosen", sizes["kept"]),
                    margins=take("margins", sizes["kept"]),
                    path=tuple(int(n) for n in take("paths", sizes["path"])),
                    probe_ids=arrays["probe_ids"][index],
                    probe_logits=arrays["probe_logits"][index],
                )
            )
            index += 1
        traces.append(
            Trace(
                text=entry["text"],
                prompt=tuple(int(i) for i in take("prompts", entry["prompt_tokens"])),
                generated=tuple(int(i) for i in take("generated", entry["generated_tokens"])),
                first_margin=entry["first_margin"],
                steps=tuple(steps),
            )
        )
    return traces
