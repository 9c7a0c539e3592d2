"""Settings of the training commands; their fields are the options of `ss-train` (ss_device/settings.py).

Nothing here loads PyTorch, so that `ss-train --help` answers at once. An adapter's schedule is in
`schedule.py`, how long a stretch of a base run is in `budget.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ss_device.command_line import positive
from ss_device.errors import UserError
from ss_device.sampling import Sampling
from ss_device.settings import setting


@dataclass(frozen=True)
class RunOptions:
    """How a run begins, and on which device (`cpu`, `cuda` or `mps`; None: what is there)."""

    resume: bool = setting(False, help="continue from the last checkpoint")
    force: bool = setting(
        False, help="start again: replace an earlier run of this output and what it wrote"
    )
    device: str | None = None


NEW_RUN = RunOptions()


@dataclass(frozen=True)
class ExampleSettings:
    """Which rows of the data are trained on."""

    limit: int | None = setting(None, help="use at most this many rows", parse=positive)
    max_length: int | None = setting(
        None, help="longest example in tokens (320, or the base's context)", parse=positive
    )

    def longest(self, context: int) -> int:
        """Tokens an example may have; UserError when the wish exceeds the base model's context."""
        if self.max_length is not None and self.max_length > context:
            raise UserError(f"--max-length {self.max_length} exceeds the base model's context of {context}")
        return self.max_length or min(320, context)


@dataclass(frozen=True)
class AdapterInputs(ExampleSettings):
    """What an adapter's training reads: which rows, and the files that it may start from."""

    valid: int = setting(200, help="rows kept out for validation", parse=positive)
    golden_prompts: Path | None = setting(None, help="prompts file to put into the folder")
    start: Path | None = setting(None, help="start from a trained adapter", metavar="ADAPTER")
    bigram_bias: Path | None = setting(
        None,
        help="bigram bias to start from (ss-train bigram-bias); frozen when bigram_shared is set",
        metavar="FILE",
    )


@dataclass(frozen=True)
class LoRASettings:
    """The shape of a plain LoRA."""

    rank: int = setting(32, help="rank of LoRA", parse=positive)
    alpha: float = setting(64.0, help="alpha of LoRA: its scale is alpha / rank")


@dataclass(frozen=True)
class BigramBiasSettings:
    """How a bigram bias is trained. A batch holds so many distinct parents; linear decay of the rate."""

    rank: int = setting(32, help="rank of the low-rank term", parse=positive)
    epochs: int = setting(30, help="passes over the data", parse=positive)
    seed: int = setting(0, help="of weights and data order")
    parents_per_batch: int = 256
    learning_rate: float = 0.02


@dataclass(frozen=True)
class Continuation:
    """How texts are continued. temperature 0 is greedy; stop strings end a text like the end token."""

    max_tokens: int = setting(96, help="longest text in tokens", parse=positive)
    temperature: float = setting(0.0, help="0: greedy (the default)", flag="--temp")
    top_p: float = setting(1.0, help="nucleus of sampling")
    seed: int = setting(0, help="of the drawn prompts and of sampling")
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.temperature != 0:
            Sampling(self.temperature, top_p=self.top_p)  # checks the ranges


@dataclass(frozen=True)
class DistillSettings(Continuation):
    """How a file of continuations is made: which prompts, how many texts of each, how many at a time."""

    samples: int = setting(1, help="sampled texts per prompt", parse=positive)
    limit: int | None = setting(None, help="number of prompts", parse=positive)
    longest_prompt: int | None = setting(
        None, help="leave out longer prompts (default: what fits the context)", parse=positive
    )
    batch_size: int = setting(64, help="prompts at a time", parse=positive)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples > 1 and self.temperature == 0:
            raise UserError("--samples needs --temp above 0: greedy texts are all the same")


@dataclass(frozen=True)
class PretrainSettings:
    """How a base model is trained, beside its recipe.

    start: a Hugging Face folder of the recipe's shape whose weights and tokenizer are the starting point;
    tokenizer_of: one whose tokenizer is taken instead of training one, for a draft model, say.
    check_minutes 0: measured at a stretch's end alone.
    """

    start: Path | None = setting(None, help="start from a base model's weights", metavar="BASE")
    tokenizer_of: Path | None = setting(
        None, help="take a base model's tokenizer, train none", flag="--tokenizer", metavar="BASE"
    )
    precision: str | None = setting(None, help="default: bf16 on CUDA, else fp32", choices=("fp32", "bf16"))
    checkpoint_minutes: float = setting(5.0, help="time between checkpoints")
    check_minutes: float = setting(
        15.0, help="measure the recipe's checks this often, and at the end", metavar="M"
    )
    shard_size: str = setting("50GB", help="largest weight file, as 15MB", metavar="SIZE")

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[1-9]\d*[KMG]B", self.shard_size):
            raise UserError(f"--shard-size {self.shard_size} is not a size as 15MB or 2GB")
