"""`load`, `generate`, `stream_generate` in the shape of mlx-lm's, so that a user changes one import."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ss_device.decoding import decode
from ss_device.errors import UserError
from ss_device.sampling import Sampler
from ss_runtime.generation import GeneratedToken, generate_tokens
from ss_runtime.loaded_model import ModelTokenizer, SpeculativeModel, open_model
from ss_runtime.samplers import MLXLMSampler, build_sampler, from_mlx_lm, mlx_lm_samplers
from ss_runtime.settings import DraftSettings, RuntimeSettings

if TYPE_CHECKING:
    import mlx.core as mx

    from ss_runtime.prompt_cache import PromptCache

MAX_TOKENS = 256  # mlx-lm's default


@dataclass(frozen=True)
class GenerationResponse:
    """One token of a generation, with mlx-lm's fields and two of ours.

    text: the next segment, empty while a character or a stop string is incomplete; from_draft: whether the
    token was drafted and accepted; prompt_tps, generation_tps: tokens per second; peak_memory: of MLX, with
    other back ends of the process, in GB; finish_reason: None, `stop` or `length`. model_calls: after the
    prompt's; tokens_per_call: tokens but the first per such call, None before the first one.
    """

    text: str
    token: int
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None
    model_calls: int
    tokens_per_call: float | None


def load(
    path: Path | str,
    adapter: Path | str | None = None,
    *,
    settings: RuntimeSettings | None = None,
    drafts: DraftSettings | None = None,
) -> tuple[SpeculativeModel, ModelTokenizer]:
    """Load a bundle of ss-convert, or a Hugging Face or mlx-lm model folder as the base alone.

        model, tokenizer = load("build/sqlctx")
        prompt = model.prompt(question="How many?", context="CREATE TABLE t (a INT)")
        print(generate(model, tokenizer, prompt))

    path: a bundle folder, a base folder or its name under models/base, or a base's id on the Hugging Face
    hub. adapter: which of the bundle's (None: the only one; the base's name: the base alone); for a base
    folder a folder of ss-train, or its name under models/adapters. settings: back end, dtype, quantization;
    drafts: trees and prompt lookup, by default what `ss-bench tune` chose for this device. Raises
    `ss_device.errors.UserError` that names what is wrong.
    """
    return open_model(path, adapter, settings, drafts)


def stream_generate(
    model: SpeculativeModel,
    tokenizer: ModelTokenizer,
    prompt: str | Sequence[int] | mx.array,
    max_tokens: int = MAX_TOKENS,
    *,
    sampler: Sampler | Callable | None = None,
    logits_processors: Sequence[Callable] | None = None,
    prompt_cache: PromptCache | None = None,
) -> Iterator[GenerationResponse]:
    """Generate, one response per token; several tokens come out of one model call.

    prompt: text, or token ids. max_tokens: -1: as many as the context holds. sampler: of `make_sampler`,
    or mlx-lm's (log-probabilities [1, V] → token); None: greedy. Exact either way: drafts change the speed,
    not the distribution. logits_processors: mlx-lm's (tokens, logits [1, V] → logits). prompt_cache: of
    `make_prompt_cache`; the prompt then goes on where its text ends. One generation at a time on a model.
    Raises UserError for a prompt that does not fit or a sampler that the back end cannot take.
    """
    ids = _prompt_ids(tokenizer, prompt)
    if prompt_cache is not None:
        ids = prompt_cache.continued(ids, tokenizer.bos_id)
    if max_tokens == -1:
        max_tokens = max(model.context - len(ids) + 1, 1)
    chosen = _sampler(sampler, logits_processors)
    model.check(ids, max_tokens, chosen)
    turn = model.begin(prompt_cache.computed if prompt_cache else None)
    text = list(ids)
    started = time.perf_counter()
    steps = decode(model.step_model, model.drafter, ids, max_tokens, model.stop_ids, chosen)
    try:
        tokens = generate_tokens(steps, model.adapter.stop_strings, tokenizer)
        for response in _responses(tokens, len(ids), started, _peak_memory(model)):
            text.append(response.token)
            yield response
            model.check_turn(turn)
    finally:
        steps.close()
        if prompt_cache is not None:
            prompt_cache.text = text


def generate(
    model: SpeculativeModel,
    tokenizer: ModelTokenizer,
    prompt: str | Sequence[int] | mx.array,
    max_tokens: int = MAX_TOKENS,
    *,
    verbose: bool = False,
    **options,
) -> str:
    """The whole text. options: of `stream_generate`; verbose: print it as it comes, and how fast."""
    text, response = "", None
    for response in stream_generate(model, tokenizer, prompt, max_tokens, **options):
        text += response.text
        if verbose:
            print(response.text, end="", flush=True)
    if verbose and response is not None:
        per_call = f", {response.tokens_per_call:.2f} tokens per call" if response.tokens_per_call else ""
        print(f"\nPrompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec")
        print(
            f"Generation: {response.generation_tokens} tokens, "
            f"{response.generation_tps:.3f} tokens-per-sec{per_call}"
        )
        print(f"Peak memory: {response.peak_memory:.3f} GB")
    return text


def make_sampler(
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    top_k: int = 0,
    seed: int | None = None,
) -> Sampler | None:
    """A sampler with mlx-lm's settings (0: off); None, greedy, at temperature 0.

    seed: the same seed gives the same text, with drafts or without (docs/method.md, Choosing tokens).
    """
    said = {"top_p": top_p or None, "min_p": min_p or None, "top_k": top_k or None, "seed": seed}
    if temp == 0:  # as mlx-lm's: the other settings say nothing then
        return None
    return build_sampler(temp, {name: value for name, value in said.items() if value is not None})


def make_logits_processors(*args, **kwargs) -> list[Callable]:
    """mlx-lm's own: logit bias, repetition, presence and frequency penalties."""
    return mlx_lm_samplers().make_logits_processors(*args, **kwargs)


def _prompt_ids(tokenizer: ModelTokenizer, prompt) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    ids = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    if not all(isinstance(token, int) for token in ids):
        raise UserError("the prompt is neither text nor a list of token ids")
    return ids


def _sampler(sampler: Sampler | Callable | None, processors: Sequence[Callable] | None):
    """One sampler for `decode` of what a caller gave."""
    processors = tuple(processors or ())
    if sampler is None or isinstance(sampler, Sampler):
        if not processors:
            return sampler
        ours = sampler or Sampler()
        return replace(ours, processors=(*ours.processors, *map(from_mlx_lm, processors)))
    return MLXLMSampler(sampler, processors)


def _responses(
    tokens: Iterator[GeneratedToken], prompt_tokens: int, started: float, peak_memory: Callable[[], float]
) -> Iterator[GenerationResponse]:
    """Counts and times of tokens as they come. The first token's time is the prompt's."""
    calls, prompt_tps, last_step = 0, 0.0, None
    for count, token in enumerate(tokens, start=1):
        now = time.perf_counter()
        if count == 1:
            prompt_tps, started = prompt_tokens / (now - started), now
        elif token.step is not last_step:
            calls += 1
        last_step = token.step
        yield GenerationResponse(
            text=token.text,
            token=token.token,
            from_draft=token.from_draft,
            prompt_tokens=prompt_tokens,
            prompt_tps=prompt_tps,
            generation_tokens=count,
            generation_tps=count / max(now - started, 1e-9),
            peak_memory=peak_memory(),
            finish_reason=token.finish_reason,
            model_calls=calls,
            tokens_per_call=(count - 1) / calls if calls else None,
        )


def _peak_memory(model: SpeculativeModel) -> Callable[[], float]:
    """What tells the most memory that was held so far, in GB."""
    if model.on_mlx:
        import mlx.core as mx

        return lambda: mx.get_peak_memory() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on a Mac, KiB on Linux
    return lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
