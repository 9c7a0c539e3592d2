"""Samplers: greedy with penalties, keyed sampling, lossy acceptance, and those made of mlx-lm's parts."""

from __future__ import annotations

import importlib.util
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from ss_device.errors import UserError
from ss_device.sampling import LogitsProcessor, Sampler, Sampling, TypicalAcceptance


def build_sampler(
    temperature: float,
    settings: dict,
    penalties: dict[str, float | None] | None = None,
    lossy_typical: float | None = None,
) -> Sampler | None:
    """A sampler, or None for greedy decoding without penalties.

    settings: fields of `Sampling` but the temperature; a missing seed is drawn at random. penalties:
    repetition, presence, frequency. Raises UserError for values that cannot be, or that greedy ignores.
    """
    processors = penalty_processors(penalties or {})
    if not math.isfinite(temperature):
        raise UserError(f"temperature {temperature} is not a finite number")
    if temperature < 0:
        raise UserError(f"temperature {temperature} must not be negative (0 is greedy)")
    if temperature == 0:
        if "seed" in settings:
            Sampling(seed=settings["seed"])  # greedy needs none, but one that cannot be is no seed
        unused = sorted(set(settings) - {"seed"}) + ["typical acceptance"] * (lossy_typical is not None)
        if unused:
            raise UserError(f"{unused[0].replace('_', '-')} needs a temperature above 0")
        return Sampler(processors=processors) if processors else None
    sampling = Sampling(temperature, **{"seed": secrets.randbits(63), **settings})
    typical = TypicalAcceptance(lossy_typical) if lossy_typical is not None else None
    return Sampler(sampling, processors, typical)


def penalty_processors(penalties: dict[str, float | None]) -> tuple[LogitsProcessor, ...]:
    """mlx-lm's processors for the penalties that are set. Raises UserError without mlx-lm."""
    wanted = {f"{name}_penalty": value for name, value in penalties.items() if value}
    if not wanted:
        return ()
    for name, value in wanted.items():
        if not math.isfinite(value):
            raise UserError(f"{name.replace('_', ' ')} {value} is not a finite number")
    if wanted.get("repetition_penalty", 1.0) < 0:
        raise UserError(f"repetition penalty {wanted['repetition_penalty']} must not be negative")
    return tuple(from_mlx_lm(processor) for processor in mlx_lm_samplers().make_logits_processors(**wanted))


@cache
def mlx_lm_samplers():
    """`mlx_lm.sample_utils`, which needs MLX alone, without the package around it: that one imports
    transformers, and torch where it is installed, for seconds and 240 MB. UserError without mlx-lm."""
    package = importlib.util.find_spec("mlx_lm")
    if package is None:
        raise UserError("penalties need mlx-lm: pip install 'ss-device[runtime]'")
    file = Path(package.origin).with_name("sample_utils.py")
    spec = importlib.util.spec_from_file_location("mlx_lm_sample_utils", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class MLXLMSampler:
    """A sampler for `decode` made of mlx-lm's own parts (`mlx_lm.sample_utils`), exact with drafts.

    sampler: log-probabilities [1, V] → token [1], as `make_sampler` returns it (temperature, top-p, top-k,
    min-p, XTC); None: argmax. processors: tokens, logits [1, V] → logits, as `make_logits_processors`
    returns them; each node is given its own text. Draws come from `mx.random`, one per node that the walk
    reaches: texts follow the plain distribution, but no seed makes them equal to plain decoding's
    (`build_sampler`'s do).
    """

    sampler: Callable | None = None
    processors: tuple[Callable, ...] = ()

    def __call__(self, logits: np.ndarray, text: Sequence[int]) -> int:
        """The token after `text` (prompt, output and the node's own path) under logits [V]."""
        import mlx.core as mx

        row = mx.array(logits)[None]
        for processor in self.processors:
            row = processor(mx.array(list(text)), row)
        if self.sampler is None:
            return int(mx.argmax(row[0]).item())
        return int(self.sampler(row - mx.logsumexp(row, axis=-1, keepdims=True)).item())


def from_mlx_lm(processor: Callable) -> LogitsProcessor:
    """A processor of mlx-lm (tokens, logits [1, V] as MLX arrays) as one of this project's."""
    import mlx.core as mx

    def process(text: Sequence[int], logits: np.ndarray) -> np.ndarray:
        return np.array(processor(mx.array(list(text)), mx.array(logits)[None])[0])

    return process
