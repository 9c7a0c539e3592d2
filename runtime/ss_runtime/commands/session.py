"""A loaded back end with everything that answering prompts needs."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field, replace

from ss_device.bundle import Bundle, BundledAdapter
from ss_device.command_line import print_json
from ss_device.decoding import Drafter
from ss_device.errors import UserError
from ss_device.sampling import Sampler
from ss_device.step_model import StepModel
from ss_runtime.backends import default_backend, open_backend
from ss_runtime.commands.cache_settings import CacheSettings, with_cache
from ss_runtime.commands.display import StepPrinter
from ss_runtime.drafts import choose_drafts
from ss_runtime.generation import GenerationStep, Result, generate_steps, summarize
from ss_runtime.plain_base import has_streams
from ss_runtime.settings import DraftSettings, RuntimeSettings
from ss_runtime.tokenization import BundleTokenizer
from ss_runtime.tuning import untuned_hint


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


def open_session(
    bundle: Bundle,
    adapter: BundledAdapter,
    tokenizer: BundleTokenizer,
    settings: RuntimeSettings,
    drafts: DraftSettings,
    cache: CacheSettings | None = None,
    max_tokens: int | None = None,
    sampler: Sampler | None = None,
) -> Session:
    """Load the back end that the settings name, with its drafter.

    cache: of keys and values that the session takes up and keeps (MLX); None: every prompt from its
    beginning. max_tokens: None: the application's.
    """
    backend = settings.backend or ("mlx" if not has_streams(adapter) else default_backend(bundle, adapter))
    settings = replace(settings, backend=backend)
    settings.check()
    bias = bundle.bigram_bias(adapter) if has_streams(adapter) else None
    chosen = choose_drafts(bundle, adapter, drafts, bias, settings.dtype, backend)
    if cache and cache.prompt_cache and backend != "mlx":
        raise UserError(f"--prompt-cache holds keys and values of MLX, not of back end '{backend}'")
    if chosen.drafter.num_nodes == 1:
        settings = settings.without_streams(adapter)
    model = open_backend(bundle, adapter, replace(settings, num_kept=chosen.num_kept))
    messages: list[dict] = []
    if cache is not None and backend == "mlx":
        model, messages = with_cache(model, bundle, adapter, settings, cache)
    return Session(
        model=model,
        messages=messages,
        drafter=chosen.drafter,
        tokenizer=tokenizer,
        adapter=adapter,
        stop_ids=frozenset(bundle.manifest.architecture.eos_ids),
        max_tokens=max_tokens or adapter.max_tokens,
        sampler=sampler,
        hint=untuned_hint(bundle, [adapter.app]) if chosen.untuned else None,
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
