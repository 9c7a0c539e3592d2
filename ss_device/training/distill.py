"""Self-distillation: the base model's own continuations of prompts, as training text."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from tokenizers import Tokenizer

from ss_device.application import Application
from ss_device.base_model import BaseFolder
from ss_device.errors import UserError
from ss_device.json_lines import Row, drop_torn_line, located, read_lines
from ss_device.outputs import output_lock, write_text
from ss_device.strict_json import decode_object, read_json
from ss_device.tokenizer_file import read_tokenizer
from ss_device.training.continuations import continuations
from ss_device.training.examples import encode_prompts, encode_turns, load_prompts
from ss_device.training.settings import Continuation, DistillSettings


@dataclass(frozen=True)
class Prompt:
    """What is continued: token ids, and the text they stand for (None: a history with end tokens)."""

    ids: tuple[int, ...]
    text: str | None = None

    def fields(self) -> dict:
        """The row's fields that say what was continued."""
        return {"prompt": self.text} if self.text is not None else {"prompt_ids": list(self.ids)}


def prompts_of(
    app: Application, base: BaseFolder, source: Path | str, settings: DistillSettings
) -> list[Prompt]:
    """What is continued of a source's rows: their prompts, or every turn of conversations.

    Raises UserError where none is short enough.
    """
    shape, tokenizer = base.architecture, read_tokenizer(base.path)
    pairs = load_prompts(app, source, settings.limit, settings.seed)
    encode = encode_turns if app.kind == "chat" else encode_prompts
    encoded = encode(app, pairs, tokenizer, shape.bos_id, shape.end_id, shape.vocab_size)
    texts = [None] * len(encoded) if app.kind == "chat" else [text for text, _ in pairs]
    longest = settings.longest_prompt or shape.max_positions - settings.max_tokens
    prompts = [Prompt(tuple(ids), t) for ids, t in zip(encoded, texts, strict=True) if len(ids) <= longest]
    if not prompts:
        raise UserError(f"{source}: no prompt of at most {longest} tokens")
    return prompts


def distill(
    model: torch.nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    output: Path,
    eos_ids: Sequence[int],
    settings: DistillSettings,
    made_from: dict,
    report: Callable[[dict], None] = lambda record: None,
) -> int:
    """Append {"prompt" or "prompt_ids", "sample", "completion_ids"} rows; returns the rows written.

    Resumable: texts that `output` already holds are kept (a half written last line is dropped), so
    more prompts or samples may be added. `<output>.settings.json` holds how texts are continued and
    `made_from` (base, data, application); a file made otherwise is refused. Texts that reach max_tokens
    without an end are kept as they are. Prompts of similar length share a batch. `report` gets step, steps,
    prompts_per_second, eta. One process at a time writes a file.
    """
    if output.suffix != ".jsonl":
        raise UserError(f"{output}: continuations are written as plain .jsonl")
    if output.exists() and not output.is_file():
        raise UserError(f"{output}: is not a plain file")
    with output_lock(output):
        check_settings(output, {**made_from, **_how_continued(settings)})
        waiting = _waiting(prompts, settings.samples, _finished(output))
        started = time.monotonic()
        with output.open("a", encoding="utf-8") as file:
            for first in range(0, len(waiting), settings.batch_size):
                batch = waiting[first : first + settings.batch_size]
                made = continuations(
                    model, tokenizer, [p.ids for p, _ in batch], eos_ids, settings, [s for _, s in batch]
                )
                for (prompt, sample), completion in zip(batch, made, strict=True):
                    row = {**prompt.fields(), "sample": sample, "completion_ids": completion}
                    file.write(json.dumps(row) + "\n")
                file.flush()
                report(_progress(first + len(batch), len(waiting), time.monotonic() - started))
    return len(waiting)


def _how_continued(settings: Continuation) -> dict:
    """What a text depends on: not how many prompts, samples and rows of a batch there are."""
    return {field.name: getattr(settings, field.name) for field in fields(Continuation)}


def _waiting(
    prompts: Sequence[Prompt], samples: int, done: set[tuple[str, int]]
) -> list[tuple[Prompt, int]]:
    """Prompt and sample of the texts that are missing, those of similar length side by side."""
    waiting = [
        (prompt, sample)
        for prompt in dict.fromkeys(prompts)
        for sample in range(samples)
        if (_key(prompt.fields()), sample) not in done
    ]
    return sorted(waiting, key=lambda item: (len(item[0].ids), item[0].ids, item[1]))


ROW_BEGINS = b'{"prompt'
"""How every row of such a file begins."""


def _progress(done: int, total: int, seconds: float) -> dict:
    return {
        "step": done,
        "steps": total,
        "prompts_per_second": round(done / max(seconds, 1e-9), 2),
        "eta": round(seconds / done * (total - done)),
    }


def check_settings(output: Path, settings: dict) -> None:
    """Write the settings beside a new `output`; UserError naming the first one that differs otherwise."""
    path = output.with_name(output.name + ".settings.json")
    settings = json.loads(json.dumps(settings))
    if not output.is_file():
        write_text(path, json.dumps(settings, indent=1) + "\n")
        return
    if not path.is_file():
        raise UserError(f"{output}: {path.name} is missing; choose another --output")
    found = read_json(path)
    for name in sorted(settings.keys() | found.keys()):
        if found.get(name) != settings.get(name):
            raise UserError(
                f"{output}: written with {name} {found.get(name)}, now {settings.get(name)}; "
                "choose another --output or delete the file"
            )


def _finished(output: Path) -> set[tuple[str, int]]:
    if not output.is_file():
        return set()
    done, cut = set(), False
    for row in _whole_rows(output):
        if row is None:
            cut = True
        else:
            done.add((_key(row), _sample(row)))
    if cut:  # only now that all before it are rows: whatever else the file is stays as it is
        drop_torn_line(output)
    return done


def _whole_rows(output: Path) -> Iterator[Row | None]:
    """The rows of a file; at its end None for the beginning of one, the trace of a killed writer."""
    for number, line in read_lines(output):
        where = f"{output}:{number}"
        if not line.endswith(b"\n") and ROW_BEGINS.startswith(line[: len(ROW_BEGINS)]):
            yield None
        else:
            yield Row(decode_object(line, where), where)


def _key(row: dict) -> str:
    """The prompt as one text. Raises UserError for a row without text and without ids."""
    if isinstance(row.get("prompt"), str):
        return row["prompt"]
    if isinstance(row.get("prompt_ids"), list):
        return json.dumps(row["prompt_ids"])
    raise located(UserError("no text 'prompt' and no list 'prompt_ids'"), row)


def _sample(row: dict) -> int:
    if type(row.get("sample")) is not int:
        raise located(UserError("'sample' is missing or no whole number"), row)
    return row["sample"]
