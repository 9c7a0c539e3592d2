"""Recipes: a TOML file that says how a base model is made (tokenizer, shape, data mix, schedule)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from ss_device.errors import UserError

KINDS = ("application", "continuations", "text", "repeat")
AUGMENTATIONS = ("", "permute_columns")


@dataclass(frozen=True)
class Source:
    """One ingredient of the data mix. `kind`: one of `KINDS` (see `corpus`).

    weight: share of the tokens. include, exclude: values of the rows' field `source` (all but those,
    none but those). until_tokens: the ingredient is left out after this many tokens of the run (0: never).
    augmentation: `permute_columns` draws the order of tables and columns in the rows' `context` anew
    whenever a row is read.
    """

    kind: str
    weight: float
    path: str = ""
    app: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    until_tokens: int = 0
    augmentation: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"source kind '{self.kind}' (expected {', '.join(KINDS)})")
        if self.augmentation not in AUGMENTATIONS:
            known = ", ".join(AUGMENTATIONS[1:])
            raise UserError(f"source augmentation '{self.augmentation}' (expected {known})")


@dataclass(frozen=True)
class Check:
    """Held-out rows that a run is measured on: an application's file, so many prompts of it.

    max_length: of a row; max_tokens: of an answer (0: the application's). In tokens.
    """

    app: str
    path: str
    prompts: int = 50
    max_length: int = 448
    max_tokens: int = 0


@dataclass(frozen=True)
class Schedule:
    """Optimisation settings of a base run. Lengths and batch size in tokens, documents' padding included.

    Warm-up, hold, decay: the rate rises linearly for `warmup_steps`, stays, and falls linearly to zero
    over the last `decay_share` of the run, which `steps` or a time budget bounds (Hu et al. 2024,
    "warmup-stable-decay"; Hägele et al. 2024). prompt_weight: the probability with which a prompt's
    token is a target; generated ones always are. checkpoints and validation by the minute.
    """

    tokens_per_batch: int
    max_length: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    steps: int = 0
    decay_share: float = 0.4
    prompt_weight: float = 1.0
    copy_initialization: bool = False


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a base model besides the data files themselves.

    cuda: settings of the schedule that differ where there is a GPU.
    """

    name: str
    seed: int
    vocab_size: int
    sample_documents: int
    model: dict
    schedule: Schedule
    sources: tuple[Source, ...]
    checks: tuple[Check, ...] = ()
    cuda: dict = field(default_factory=dict)

    def on(self, device: str) -> Recipe:
        """The recipe as it is run on `cpu` or `cuda`."""
        return replace(self, schedule=replace(self.schedule, **self.cuda)) if device == "cuda" else self


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
            checks=tuple(_record(Check, c, path) for c in raw.get("checks", ())),
            cuda=_schedule_changes(raw.get("cuda", {}), path),
        )
    except KeyError as error:
        raise UserError(f"{path}: missing key {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML ({error})") from error


def _tuples(raw: dict) -> dict:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}


def _schedule_changes(raw: dict, path: Path) -> dict:
    known = {f.name for f in fields(Schedule)}
    unknown = sorted(set(raw) - known)
    if unknown:
        raise UserError(f"{path}: unknown key 'cuda.{unknown[0]}' (expected {', '.join(sorted(known))})")
    return raw


def _record(kind: type, raw: dict, path: Path):
    known = {f.name for f in fields(kind)}
    unknown = sorted(set(raw) - known)
    if unknown:
        raise UserError(f"{path}: unknown key '{unknown[0]}' (expected {', '.join(sorted(known))})")
    try:
        return kind(**raw)
    except (TypeError, UserError) as error:
        raise UserError(f"{path}: {error}") from error
