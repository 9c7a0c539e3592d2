"""Self-distillation: the base model's own greedy continuations as training text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from ss_device.json_lines import read_json_lines


def distill(
    model: torch.nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    output: Path,
    bos_id: int | None,
    eos_id: int,
    max_tokens: int = 96,
    batch_size: int = 64,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Append {"prompt", "completion_ids"} rows for `prompts` to `output`; returns the rows written.

    Resumable: prompts that `output` already holds are skipped. Continuations that reach `max_tokens`
    without an end token are kept as they are. Prompts of similar length share a batch.
    """
    done = {row["prompt"] for row in read_json_lines(output)} if output.is_file() else set()
    waiting = [p for p in dict.fromkeys(prompts) if p not in done]
    encoded = tokenizer.encode_batch_fast(waiting, add_special_tokens=False)
    start = [] if bos_id is None else [bos_id]
    items = sorted(
        ((text, [*start, *e.ids]) for text, e in zip(waiting, encoded, strict=True)),
        key=lambda item: len(item[1]),
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a") as file:
        for first in range(0, len(items), batch_size):
            batch = items[first : first + batch_size]
            completions = continuations(model, [ids for _, ids in batch], eos_id, max_tokens)
            for (text, _), completion in zip(batch, completions, strict=True):
                file.write(json.dumps({"prompt": text, "completion_ids": completion}) + "\n")
            file.flush()
            report(first + len(batch), len(items))
    return len(items)


@torch.no_grad()
def continuations(
    model: torch.nn.Module, prompts: Sequence[Sequence[int]], eos_id: int, max_tokens: int
) -> list[list[int]]:
    """Greedy continuations (end token included) of a batch of token id lists."""
    device = next(model.parameters()).device
    width = max(len(p) for p in prompts)
    ids = torch.full((len(prompts), width), eos_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    out = model.generate(
        ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=eos_id,
        pad_token_id=eos_id,
    )
    rows = out[:, width:].tolist()
    return [row[: row.index(eos_id) + 1] if eos_id in row else row for row in rows]
