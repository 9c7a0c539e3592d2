"""A loaded back end with everything that answering prompts needs."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

from ss_device.bundle import BundledAdapter
from ss_device.command_line import print_json
from ss_device.decoding import Drafter
from ss_device.sampling import Sampler
from ss_device.step_model import StepModel
from ss_runtime.commands.display import StepPrinter
from ss_runtime.generation import GenerationStep, Result, generate_steps, summarize
from ss_runtime.tokenization import BundleTokenizer


@dataclass(frozen=True)
class Session:
    """A loaded back end with everything a generation needs. messages: of a conversation taken up again;
    hint: a line for the user before the first answer."""

    model: StepModel
    drafter: Drafter
    tokenizer: BundleTokenizer
    adapter: BundledAdapter
    stop_ids: frozenset[int]
    max_tokens: int
    sampler: Sampler | None = None
    messages: list[dict] = field(default_factory=list)
    hint: str | None = None

    def steps(self, prompt_ids: list[int]):
        """Iterator of GenerationStep for one prompt."""
        return generate_steps(
            self.model,
            self.drafter,
            prompt_ids,
            self.max_tokens,
            self.stop_ids,
            self.adapter.stop_strings,
            self.tokenizer,
            self.sampler,
        )


def run_prompt(
    session: Session, ids: list[int], show_steps: bool = False, as_json: bool = False
) -> tuple[list[GenerationStep], Result]:
    """Answer one prompt, writing to stdout as the options say."""
    printer = StepPrinter(session.tokenizer) if show_steps and not as_json else None
    if printer:
        printer.legend()
    records, started, prefilled = [], time.perf_counter(), 0.0
    for record in session.steps(ids):
        prefilled = prefilled or time.perf_counter()
        records.append(record)
        if printer:
            printer.step(record)
        elif not as_json:
            sys.stdout.write(record.text)
            sys.stdout.flush()
    seconds = prefilled - started, time.perf_counter() - prefilled
    result = summarize(records, len(ids), *seconds, session.sampler)
    if as_json:
        print_json(result.to_dict())
    elif printer:
        printer.totals(records, result)
    else:
        print(flush=True)
    return records, result
