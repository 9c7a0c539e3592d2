"""Text generation over any step model: streaming text, stop strings, counts and times."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from ss_device.decoding import Drafter, Step, decode
from ss_device.sampling import Sampler
from ss_device.step_model import StepModel
from ss_runtime.tokenization import BundleTokenizer, Detokenizer


@dataclass(frozen=True)
class GenerationStep:
    """One model call's outcome; the first is the prefill's.

    text: the new segment, ready to print (text that may turn out to be the start of a stop string, or
    half a character, waits for a later step); tokens: new token ids, an end token included; num_drafted:
    how many of them, from the front, were drafted; finish_reason: None, `stop` or `length`; step: the
    decoding loop's record, before a stop string cut it.
    """

    text: str
    tokens: tuple[int, ...]
    num_drafted: int
    finish_reason: str | None
    step: Step


@dataclass(frozen=True)
class GeneratedToken:
    """One token of a generation. text: as in `GenerationStep`; from_draft: whether it was drafted.

    step: the call that gave it.
    """

    text: str
    token: int
    from_draft: bool
    finish_reason: str | None
    step: Step


@dataclass(frozen=True)
class Result:
    """A finished generation.

    token_ids holds the end token if one was generated, text does not. steps: model calls after prefill;
    tokens_per_call: generated tokens but the first, per such call (None without one); seconds: wall time
    of `prefill` and `decode`; lossy_typical: epsilon of a lossy choice, whose text is not the plain one.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    generated_tokens: int
    steps: int
    tokens_per_call: float | None
    seconds: dict[str, float]
    finish_reason: str
    lossy_typical: float | None = None

    def to_dict(self) -> dict:
        """For JSON."""
        return asdict(self)


class StopStrings:
    """Watches growing text for stop strings and holds back what may become one."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [s for s in strings if s]
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Text that may be shown, and whether a stop string was met (what follows it is dropped)."""
        self._held += text
        found = [at for s in self._strings if (at := self._held.find(s)) >= 0]
        shown = min(found) if found else len(self._held) - self._open_suffix()
        text, self._held = self._held[:shown], "" if found else self._held[shown:]
        return text, bool(found)

    def finish(self) -> str:
        """What was held back and turned out to be ordinary text."""
        text, self._held = self._held, ""
        return text

    def _open_suffix(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(s) for s in self._strings), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-count:]) for s in self._strings):
                return count
        return 0


def generate_steps(
    step_model: StepModel,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    max_tokens: int,
    stop_ids: frozenset[int],
    stop_strings: Sequence[str],
    tokenizer: BundleTokenizer,
    sampler: Sampler | None = None,
) -> Iterator[GenerationStep]:
    """Generate, one record per model call (`ss_device.decoding.decode`); greedily without a sampler.

    Ends with a stop id, with the token that completes a stop string (whose text is cut off), after
    `max_tokens`, or when the context is full. Tokens and text do not depend on the drafter
    (unless the sampler is lossy).
    """
    writer, stops = tokenizer.detokenizer(), StopStrings(stop_strings)
    for step in decode(step_model, drafter, prompt_ids, max_tokens, frozenset(stop_ids), sampler):
        record = _write(step, writer, stops)
        yield record
        if record.finish_reason:
            return


def _write(step: Step, writer: Detokenizer, stops: StopStrings) -> GenerationStep:
    """One step's tokens as text."""
    tokens = list(_token_texts(step, writer, stops))
    ids = tuple(token.token for token in tokens)
    drafted = sum(token.from_draft for token in tokens)
    text = "".join(token.text for token in tokens)
    return GenerationStep(text, ids, drafted, tokens[-1].finish_reason, step)


def _token_texts(step: Step, writer: Detokenizer, stops: StopStrings) -> Iterator[GeneratedToken]:
    """A step's tokens one by one: a stop string ends the text within a step."""
    for index, token in enumerate(step.tokens):
        text, stopped = stops.add(writer.add(token))
        reason = "stop" if stopped else None
        if not stopped and step.finish_reason and index == len(step.tokens) - 1:
            rest, met = stops.add(writer.finish())
            text += rest if met else rest + stops.finish()
            reason = step.finish_reason
        yield GeneratedToken(text, token, index < step.num_drafted, reason, step)
        if stopped:
            return


def generate_tokens(steps: Iterator[Step], stop_strings: Sequence[str], tokenizer: BundleTokenizer):
    """The tokens of a decoding loop's steps (`ss_device.decoding.decode`), one `GeneratedToken` each.

    Ends with the token that completes a stop string, whose text is cut off.
    """
    writer, stops = tokenizer.detokenizer(), StopStrings(stop_strings)
    for step in steps:
        for token in _token_texts(step, writer, stops):
            yield token
            if token.finish_reason:
                return


def generate(
    step_model: StepModel,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    max_tokens: int,
    stop_ids: frozenset[int],
    stop_strings: Sequence[str],
    tokenizer: BundleTokenizer,
    sampler: Sampler | None = None,
) -> Result:
    """Run `generate_steps` to the end and count. Same arguments and errors."""
    start = time.perf_counter()
    steps = generate_steps(
        step_model, drafter, prompt_ids, max_tokens, stop_ids, stop_strings, tokenizer, sampler
    )
    records = [next(steps)]
    prefilled = time.perf_counter()
    records.extend(steps)
    seconds = prefilled - start, time.perf_counter() - prefilled
    return summarize(records, len(prompt_ids), *seconds, sampler)


def summarize(
    records: list[GenerationStep],
    prompt_tokens: int,
    prefill: float,
    decoding: float,
    sampler: Sampler | None = None,
) -> Result:
    """The Result of a generation from its records, the seconds of both phases and how it chose."""
    tokens = tuple(token for record in records for token in record.tokens)
    calls = len(records) - 1
    return Result(
        text="".join(record.text for record in records),
        token_ids=tokens,
        prompt_tokens=prompt_tokens,
        generated_tokens=len(tokens),
        steps=calls,
        tokens_per_call=(len(tokens) - 1) / calls if calls else None,
        seconds={"prefill": prefill, "decode": decoding},
        finish_reason=records[-1].finish_reason,
        lossy_typical=lossy_epsilon(sampler),
    )


def lossy_epsilon(sampler: Sampler | None) -> float | None:
    """Epsilon of typical acceptance, None for an exact choice."""
    typical = getattr(sampler, "lossy_typical", None)
    return typical.epsilon if typical else None
