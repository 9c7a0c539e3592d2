"""Tokens per call of one adapter under many trees, replayed over the model's own continuations."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from ss_device.adapter import Adapter, load_adapter
from ss_device.application import load_application
from ss_device.base_model import open_base
from ss_device.config import parameter_count
from ss_device.decoding import Drafter
from ss_device.errors import UserError
from ss_device.evaluation.metrics import score
from ss_device.evaluation.prompts import load_test_prompts
from ss_device.evaluation.replay import replay
from ss_device.evaluation.stopping import text_before_stop
from ss_device.json_lines import read_json_lines
from ss_device.prompt_lookup import PromptLookup
from ss_device.reference.stream_model import load_stream_model
from ss_device.training.chat_template import with_tokenizer_template
from ss_device.training.continuations import Continuation
from ss_device.training.distill import Prompt, distill
from ss_device.training.examples import encode_prompts


@dataclass(frozen=True)
class TreeChoice:
    """A tree to replay: `SHAPE:NODES`, and `:STREAMS` to draft with fewer streams than trained.

    A shape that ends in `+lookup` lets copies from prompt and output compete for the nodes.
    """

    shape: str
    nodes: int
    streams: int | None = None

    @property
    def copies(self) -> bool:
        return self.shape.endswith("+lookup")

    @staticmethod
    def parse(text: str) -> TreeChoice:
        """`best-first:32`, `chain:5`, `best-first+lookup:12:2`; UserError for anything else."""
        shape, *numbers = text.split(":")
        if len(numbers) not in (1, 2) or not all(n.isdigit() and int(n) > 0 for n in numbers):
            raise UserError(f"tree '{text}' is not SHAPE:NODES or SHAPE:NODES:STREAMS, as best-first:32")
        choice = TreeChoice(shape, *map(int, numbers))
        choice.drafter(None)
        return choice

    def drafter(self, adapter: Adapter | None) -> Drafter:
        bias = adapter.parent_bias() if adapter else None
        return Drafter(
            self.nodes,
            self.shape.removesuffix("+lookup"),
            parent_bias=bias,
            max_streams=self.streams,
            lookup=PromptLookup() if self.copies else None,
        )

    def __str__(self) -> str:
        return f"{self.shape}:{self.nodes}" + (f":{self.streams}" if self.streams else "")


def replay_adapter(
    adapter_folder: Path,
    base_folder: Path,
    data: Path | str,
    continuations: Path,
    trees: Sequence[TreeChoice],
    limit: int,
    max_tokens: int | None = None,
    longest_prompt: int | None = None,
    report: Callable[[dict], None] = lambda record: None,
) -> dict:
    """Acceptance of an adapter on `limit` prompts of `data` for every tree (see `replay`), and the metric.

    The prompts are those that `evaluate` draws. `continuations`: JSON lines of the model's own text,
    made here where prompts are missing; every lossless adapter of a base shares them. Prompts of more
    than `longest_prompt` tokens (default: what leaves room for `max_tokens` in the context) are left
    out and counted.
    """
    base, adapter = open_base(base_folder), load_adapter(adapter_folder)
    app = with_tokenizer_template(load_application(adapter.app), base.path)
    tokenizer = Tokenizer.from_file(str(base.path / "tokenizer.json"))
    shape = base.architecture
    max_tokens = max_tokens or app.max_tokens
    tests = load_test_prompts(app, data, limit)
    encoded = encode_prompts(
        app, [(t.text, t.row) for t in tests], tokenizer, shape.bos_id, shape.eos_ids[0]
    )
    room = longest_prompt or shape.max_positions - max_tokens
    fitting = [(t, ids) for t, ids in zip(tests, encoded, strict=True) if len(ids) <= room]
    if not fitting:
        raise UserError(f"{data}: no prompt of at most {room} tokens")
    prompts = [ids for _, ids in fitting]
    model = load_stream_model(base, adapter)
    settings = Continuation(max_tokens, stop_strings=app.stop_strings)
    outputs = _own_texts(model, adapter, tokenizer, fitting, continuations, settings, report)
    counts = replay(
        model, [t.drafter(adapter) for t in trees], prompts, outputs, frozenset(shape.eos_ids), max_tokens,
        report=lambda done, total: report({"step": done, "steps": total}),
    )  # fmt: skip
    texts = [text_before_stop(ids, tokenizer, app.stop_strings) for ids in outputs]
    return {
        "app": app.name,
        "adapter": adapter_folder.name,
        "left_out_too_long": len(tests) - len(fitting),
        **score(app.metric, texts, [t.references for t, _ in fitting], app.over_references),
        "parameters": parameter_count(adapter.config, shape),
        "trees": {str(t): c.summary() for t, c in zip(trees, counts, strict=True)},
    }


def _own_texts(model, adapter, tokenizer, fitting, path, settings, report) -> list[list[int]]:
    """The model's own greedy continuations of (question, ids) pairs, kept in the file `path`."""
    made_from: dict = {"app": adapter.app, "base": adapter.base.to_dict()}
    if adapter.lora:
        # Shared mode: the text is this adapter's own.
        parts = hashlib.sha256()
        for name in sorted(adapter.lora):
            for factor in adapter.lora[name]:
                parts.update(factor.tobytes())
        made_from["lora"] = parts.hexdigest()
    asked = [Prompt(tuple(ids), question.text) for question, ids in fitting]
    ends = model.architecture.eos_ids
    distill(model.base, tokenizer, asked, path, ends, settings, made_from, report=report)
    own = {row["prompt"]: row["completion_ids"] for row in read_json_lines(path)}
    return [own[question.text] for question, _ in fitting]
