"""Pre-training of a small Llama base model from a recipe: in stretches, resumable, on accelerate."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from ss_device.errors import UserError, library_errors
from ss_device.families import read_architecture
from ss_device.files import check_plain
from ss_device.outputs import check_output_folder, folder_in_one_go, holds_only, recover_folder
from ss_device.reference.device import chosen_device
from ss_device.reference.hugging_face import model_settings, plain_config
from ss_device.strict_json import read_json, typed
from ss_device.tokenizer_file import read_tokenizer
from ss_device.training import explicit_attention
from ss_device.training.base_checks import BaseChecks
from ss_device.training.base_run import BaseRun, NextTokenLoss, Progress, Stretch
from ss_device.training.budget import Budget
from ss_device.training.checkpoint import load_checkpoint
from ss_device.training.copy_initialization import wire_copying
from ss_device.training.corpus import BOS, EOS, PAD
from ss_device.training.document_stream import DocumentStream
from ss_device.training.processes import joined_processes
from ss_device.training.recipe import Recipe, Schedule
from ss_device.training.run_folder import STATES, check_new_run, check_plain_entries, run_folder
from ss_device.training.settings import NEW_RUN, PretrainSettings, RunOptions
from ss_device.training.stretch_end import has_ended, mark_written
from ss_device.training.tokenizer import train_tokenizer


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Sharp attention makes denormal probabilities, which CPUs multiply very slowly: they are zero here.

    Taken back afterwards, for what else this process computes. Worker threads take the setting over when
    they are started, so the first parallel operation has to lie within.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


# What a finished run writes (`save_base`).
BASE_FILES = (
    "config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json",
    "tokenizer.json", "tokenizer_config.json",
)  # fmt: skip


@flushed_denormals()
def pretrain(
    recipe: Recipe,
    data: Path,
    output: Path,
    budget: Budget | None = None,
    settings: PretrainSettings | None = None,
    run: RunOptions = NEW_RUN,
    report: Callable[[dict], None] = lambda record: None,
) -> None:
    """Train the recipe's base model and write a Hugging Face folder (fp16 safetensors) to `output`.

    `budget`: how long this stretch is (default: the recipe's steps). A stretch ends annealed; `run.resume`
    goes on with an interrupted one (its model may be all that is missing), which keeps its budget, or
    else starts a further one from the state before the decay; with `run.force` an earlier run and what it
    wrote are replaced. Checkpoints and the log live in `<output>.run/`; `report` receives every log
    record: step, steps, loss, lr, tokens, tokens_per_second, eta, and `valid` every `check_minutes`.
    Raises UserError for data, a budget, a start or a tokenizer that do not fit the recipe.
    """
    accelerator = joined_processes(run.device)
    recipe = recipe.on(accelerator.device.type)
    if not run.resume:
        _checked_budget(budget, recipe)
    recipe.check_files(data)
    folder = run_folder(output)
    _open_run(folder, output, run, accelerator)
    settings = settings or PretrainSettings()
    begun_with = settings.start or settings.tokenizer_of
    if accelerator.is_main_process and begun_with:
        _copy_tokenizer(begun_with, recipe, folder / "tokenizer")
    training = _base_run(recipe, data, output, budget, settings, run, accelerator, report)
    training.run()
    if accelerator.is_main_process and not training.budget.hold:
        save_base(training.model, folder / "tokenizer", output, settings.shard_size)
        mark_written(folder, training.progress)


def _base_run(recipe, data, output, budget, settings, run, accelerator, report) -> BaseRun:
    """The stretch as it begins: a new model and the first documents, or the state of a checkpoint."""
    folder = run_folder(output)
    tokenizer = _tokenizer(recipe, data, folder, accelerator)
    stream = DocumentStream(recipe, data, tokenizer)
    checks = BaseChecks(recipe, data, tokenizer)
    start = settings.start
    model = build_model(recipe, tokenizer) if start is None else started_model(recipe, start)
    on_gpu = accelerator.device.type == "cuda"
    model.set_attn_implementation("sdpa" if on_gpu else explicit_attention.NAME)
    optimizer = build_optimizer(model, recipe.schedule)
    progress = _restore(folder, output, model, optimizer, stream) if run.resume else Progress()
    if accelerator.is_main_process and not progress.step:
        mark_written(
            folder, progress
        )  # nothing as yet: whatever ends without its model is to be told apart
    progress.stretch = _stretch(progress, budget, recipe, folder)
    precision = settings.precision or default_precision(run.device)
    objective, optimizer = accelerator.prepare(NextTokenLoss(model, precision, on_gpu), optimizer)
    return BaseRun(
        accelerator, objective, optimizer, recipe, stream, checks, folder, progress,
        settings.checkpoint_minutes, settings.check_minutes, report,
    )  # fmt: skip


def default_precision(device: str | None = None) -> str:
    """bf16 autocast where a GPU computes; float32, which resumes to the same bytes, elsewhere."""
    return "bf16" if chosen_device(device).type == "cuda" else "fp32"


def _checked_budget(budget: Budget | None, recipe: Recipe) -> Budget:
    """The budget of a new stretch: the one given, or the recipe's steps. UserError where neither is."""
    budget = budget or Budget(steps=recipe.schedule.steps)
    if not budget.steps and not budget.minutes:
        raise UserError(f"recipe '{recipe.name}' has no 'steps': give --steps or --minutes")
    return budget


def _stretch(progress: Progress, budget: Budget | None, recipe: Recipe, run: Path) -> Stretch:
    """The interrupted stretch, or a new one. UserError for another budget than the interrupted one's."""
    found = progress.stretch
    if found is None:
        new = _checked_budget(budget, recipe)
        return Stretch(**asdict(new), first_step=progress.step, before=progress.seconds)
    if budget and found.budget != budget:
        raise UserError(
            f"{run}: the stretch to resume is one of {found.budget}, not of {budget}; give the same "
            "again, or only --resume"
        )
    return found


def _open_run(folder: Path, output: Path, run: RunOptions, accelerator: Accelerator) -> None:
    if run.resume:
        check_plain_entries(folder)
    for name in STATES:
        recover_folder(folder / name)
    trained = any((folder / name).exists() for name in STATES)

    def is_ours(found: Path) -> bool:
        """A base folder of which nobody knows where it comes from is the user's."""
        return trained and holds_only(found, BASE_FILES)

    check_new_run(folder, run.force or run.resume)
    check_output_folder(output, "a base model", is_ours, run.force or run.resume)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if not run.resume:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()


def _restore(run: Path, output: Path, model, optimizer, stream: DocumentStream) -> Progress:
    """The state of the interrupted stretch, or the one before the decay of a finished one."""
    record = load_checkpoint(run / "checkpoint", model, optimizer)
    if record is None:
        return Progress()
    progress = _recorded(record, run / "checkpoint")
    if has_ended(run, output, progress):
        held = load_checkpoint(run / "held", model, optimizer) or record
        progress = _recorded(held, run / "held")
        progress.stretch, progress.held = None, False
    stream.restore(progress.stream)
    return progress


def _recorded(record: dict, folder: Path) -> Progress:
    """The progress in a checkpoint's record."""
    progress = typed(Progress, record, f"{folder}: record.json")
    if progress.stretch is None:
        raise UserError(f"{folder}: record.json: 'stretch' is missing")
    return progress


@dataclass(frozen=True)
class TrainedTime:
    """Minutes of training behind a run, those before the last stretch's decay, and whether that ended
    and wrote its model."""

    minutes: float
    before_decay: float
    ended: bool


def trained_time(output: Path) -> TrainedTime | None:
    """How far the run that writes `output` has come, by its checkpoints; None where there is none."""
    found, run = {}, output.with_name(output.name + ".run")
    for name in ("checkpoint", "held"):
        recover_folder(run / name)
        record = run / name / "record.json"
        found[name] = _recorded(read_json(record), run / name) if record.is_file() else None
    last, held = found["checkpoint"], found["held"]
    if last is None:
        return None
    return TrainedTime(last.seconds / 60, (held or last).seconds / 60, has_ended(run, output, last))


def build_model(recipe: Recipe, tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A freshly initialised Llama of the recipe's shape (tied head), seeded by the recipe."""
    torch.manual_seed(recipe.seed)
    if unknown := sorted(set(recipe.model) - model_settings(LlamaConfig)):
        raise UserError(f"recipe '{recipe.name}': model: '{unknown[0]:.80}' is no setting of Llama models")
    with library_errors(f"recipe '{recipe.name}': model"):
        config = LlamaConfig(
            vocab_size=recipe.vocab_size,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.token_to_id(BOS),
            eos_token_id=tokenizer.token_to_id(EOS),
            pad_token_id=tokenizer.token_to_id(PAD),
            **recipe.model,
        )
        _check_sizes(config, recipe)
        model = LlamaForCausalLM(config)
    if recipe.schedule.copy_initialization:
        wire_copying(model, recipe.seed)
    return model


def _check_sizes(config: LlamaConfig, recipe: Recipe) -> None:
    """UserError for sizes that make no sense, before memory is taken for them."""
    try:
        read_architecture(config.to_dict())
    except UserError as error:
        raise UserError(f"recipe '{recipe.name}': model: {error}") from error


def started_model(recipe: Recipe, start: Path) -> LlamaForCausalLM:
    """The model in `start` in float32; UserError when its shape is not the recipe's."""
    if not (start / "config.json").is_file():
        raise UserError(f"{start}: no base model here (config.json is missing)")
    check_plain(start)
    try:
        read_architecture(read_json(start / "config.json"))
    except UserError as error:
        raise UserError(f"{start}: {error}") from error
    with library_errors(f"{start}: transformers cannot load this base model"):
        model = LlamaForCausalLM.from_pretrained(
            start, config=plain_config(start), dtype=torch.float32, use_safetensors=True
        )
    _check_shape(model, recipe, start)
    return model


def _check_shape(model: LlamaForCausalLM, recipe: Recipe, start: Path) -> None:
    wanted = {"vocab_size": recipe.vocab_size, **recipe.model}
    for name, value in wanted.items():
        found = getattr(model.config, name, None)
        if found != value:
            raise UserError(f"{start}: {name} is {found}, the recipe says {value}")


def build_optimizer(model: torch.nn.Module, schedule: Schedule) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": schedule.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=schedule.learning_rate, betas=(0.9, 0.95), fused=True)


def _tokenizer(recipe: Recipe, data: Path, run: Path, accelerator: Accelerator) -> Tokenizer:
    folder = run / "tokenizer"
    with accelerator.main_process_first():
        if not (folder / "tokenizer.json").is_file():
            with folder_in_one_go(folder) as temporary:
                train_tokenizer(recipe, data, temporary)
    return read_tokenizer(folder)


def _copy_tokenizer(start: Path, recipe: Recipe, folder: Path) -> None:
    names = ("tokenizer.json", "tokenizer_config.json")
    for name in names:
        if not (start / name).is_file():
            raise UserError(f"{start}: {name} is missing")
    tokenizer = read_tokenizer(start)
    size = tokenizer.get_vocab_size()
    if size != recipe.vocab_size:
        raise UserError(f"{start}: the tokenizer has {size} tokens, the recipe says {recipe.vocab_size}")
    for token in (BOS, EOS, PAD):
        if tokenizer.token_to_id(token) is None:
            raise UserError(f"{start}: the tokenizer has no token '{token}'")
    with folder_in_one_go(folder) as temporary:
        for name in names:
            shutil.copy(start / name, temporary / name)


def save_base(model: LlamaForCausalLM, tokenizer: Path, output: Path, shard_size: str = "50GB") -> None:
    """Write model (fp16) and tokenizer as one Hugging Face folder, renamed into place when whole."""
    with folder_in_one_go(output) as folder:
        for file in tokenizer.iterdir():
            shutil.copy(file, folder / file.name)
        half = LlamaForCausalLM(model.config).to(torch.float16)
        half.load_state_dict(model.state_dict())
        half.save_pretrained(folder, safe_serialization=True, max_shard_size=shard_size)
