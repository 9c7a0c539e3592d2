"""Recipes: a TOML file that says how a base model is made (tokenizer, shape, data mix, schedule)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath

from ss_device.errors import UserError
from ss_device.names import check_name
from ss_device.strict_json import read_toml, typed

KINDS = ("application", "continuations", "text", "repeat")
AUGMENTATIONS = ("", "permute_columns")
MOST = 1 << 20
"""Rows, or tokens of a row: what a mistyped recipe must not make a run of days."""
LONGEST_PATH = 255
"""Characters: what file systems take as one name."""
MOST_PER_BATCH = 1 << 22
"""Tokens of a batch: the documents of several are held in memory."""


def _check_path(path: str) -> None:
    """UserError for a path that is not one of the data folder."""
    if len(path) > LONGEST_PATH:
        raise UserError(f"path '{path:.40}…' has {len(path)} characters, at most {LONGEST_PATH}")
    if PurePath(path).is_absolute() or ".." in PurePath(path).parts:
        raise UserError(f"path '{path}' leads out of the data folder")
    if path and not PurePath(path).name:
        raise UserError(f"path '{path}' is no file of the data folder")


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
        _check_path(self.path)
        if not 0 <= self.weight <= 1:
            raise UserError(f"source weight {self.weight} must lie between 0 and 1")
        if self.kind != "repeat" and not self.path:
            raise UserError(f"a source of kind '{self.kind}' needs a path")
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

    def __post_init__(self) -> None:
        _check_path(self.path)
        for name, least in (("prompts", 1), ("max_length", 1), ("max_tokens", 0)):
            if not least <= getattr(self, name) <= MOST:
                raise UserError(f"check of '{self.path}': {name} must lie between {least} and {MOST}")


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

    def __post_init__(self) -> None:
        for name, most in (("tokens_per_batch", MOST_PER_BATCH), ("max_length", MOST)):
            if not 1 <= getattr(self, name) <= most:
                raise UserError(f"{name} {getattr(self, name)} must lie between 1 and {most}")
        for name in ("learning_rate", "warmup_steps", "weight_decay", "steps"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} {getattr(self, name)} must not be negative")
        for name in ("decay_share", "prompt_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} {getattr(self, name)} must lie between 0 and 1")


@dataclass(frozen=True)
class TokenizerTable:
    """The `[tokenizer]` table. vocab_size in tokens, sample_documents: how many it is trained on."""

    vocab_size: int
    sample_documents: int

    def __post_init__(self) -> None:
        if not 1 <= self.vocab_size <= MOST:
            raise UserError(f"vocab_size {self.vocab_size} must lie between 1 and {MOST}")
        if self.sample_documents < 1:
            raise UserError(f"sample_documents {self.sample_documents} must be at least 1")


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a base model besides the data files themselves: the tables of its file.

    model: shape, as LlamaConfig's settings. cuda: settings of the schedule that differ on a GPU.
    """

    name: str
    seed: int
    tokenizer: TokenizerTable
    model: dict
    training: Schedule
    sources: tuple[Source, ...]
    checks: tuple[Check, ...] = ()
    cuda: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UserError(f"seed {self.seed} must not be negative")
        if not any(source.weight > 0 and not source.until_tokens for source in self.sources):
            raise UserError("none of the sources has a weight until the run's end")

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def schedule(self) -> Schedule:
        return self.training

    def check_files(self, data: Path) -> None:
        """UserError for a source or check whose file is not in the folder `data`."""
        for entry in (*self.sources, *self.checks):
            if entry.path and not (data / entry.path).is_file():
                raise UserError(f"recipe '{self.name}': {data / entry.path}: no such file")

    def on(self, device: str) -> Recipe:
        """The recipe as it is run on `cpu` or `cuda`."""
        return replace(self, training=replace(self.training, **self.cuda)) if device == "cuda" else self


def load_recipe(path: Path | str) -> Recipe:
    """Read a recipe. Raises UserError that names the file and the key that is wrong or missing."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such recipe")
    recipe = typed(Recipe, read_toml(path), str(path))
    check_name(recipe.name, f"{path}: name")
    # The changes alone lack what a schedule must have: they are checked as part of the whole.
    typed(Schedule, {**asdict(recipe.training), **recipe.cuda}, f"{path}: cuda")
    return recipe
