"""Recipes: a TOML file that says how a base model is made (tokenizer, shape, data mix, schedule)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from ss_device.errors import UserError

KINDS = ("application", "continuations", "text", "repeat")


@dataclass(frozen=True)
class Source:
    """One ingredient of the data mix. `kind`: one of `KINDS` (see `corpus`)."""

    kind: str
    weight: float
    path: str = ""
    app: str = ""
    exclude: tuple[str, ...] = ()
    until: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"source kind '{self.kind}' (expected {', '.join(KINDS)})")


@dataclass(frozen=True)
class Schedule:
    """Optimisation settings of a base run. Lengths and batch size in tokens.

    The rate decays linearly over `steps`. A cooldown, when given, multiplies it by a second linear
    ramp to zero from step `cooldown_start` on and ends the run after `cooldown_steps` more.
    """

    steps: int
    tokens_per_batch: int
    max_length: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    prompt_weight: float = 1.0
    copy_initialization: bool = False
    cooldown_start: int = 0
    cooldown_steps: int = 0

    @property
    def last_step(self) -> int:
        """Steps that are really run."""
        return self.cooldown_start + self.cooldown_steps if self.cooldown_steps else self.steps


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a base model besides the data files themselves."""

    name: str
    seed: int
    vocab_size: int
    sample_documents: int
    model: dict
    schedule: Schedule
    sources: tuple[Source, ...]


def load_recipe(path: Path | str) -> Recipe:
    """Read a recipe. Raises UserError that names the file and the key that is wrong or missing."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such recipe")
    try:
        raw = tomllib.loads(path.read_text())
        return Recipe(
            name=raw["name"],
            seed=int(raw["seed"]),
            vocab_size=int(raw["tokenizer"]["vocab_size"]),
            sample_documents=int(raw["tokenizer"]["sample_documents"]),
            model=dict(raw["model"]),
            schedule=_record(Schedule, raw["training"], path),
            sources=tuple(_record(Source, _tuples(s), path) for s in raw["sources"]),
        )
    except KeyError as error:
        raise UserError(f"{path}: missing key {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML ({error})") from error


def _tuples(raw: dict) -> dict:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}


def _record(kind: type, raw: dict, path: Path):
    known = {f.name for f in fields(kind)}
    unknown = sorted(set(raw) - known)
    if unknown:
        raise UserError(f"{path}: unknown key '{unknown[0]}' (expected {', '.join(sorted(known))})")
    try:
        return kind(**raw)
    except (TypeError, UserError) as error:
        raise UserError(f"{path}: {error}") from error
