"""ss-train base: pre-train a small base model from a recipe."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from ss_device.command_line import add_device
from ss_device.errors import UserError
from ss_device.settings import add_settings, settings_of
from ss_device.training.budget import Budget
from ss_device.training.commands.common import RECORDS_HELP
from ss_device.training.settings import PretrainSettings, RunOptions

STARTS = ("start", "tokenizer_of")
OTHERS = ("precision", "checkpoint_minutes", "check_minutes", "shard_size")


def add(commands) -> None:
    """Its place among the sub-commands."""
    parser = commands.add_parser(
        "base",
        help="pre-train a small base model from a recipe",
        example="ss-train base models/recipes/ss_demo_base.toml --data data --output models/base/mine",
    )
    parser.add_argument("recipe", type=Path, help="TOML recipe: tokenizer, shape, data mix, schedule")
    parser.add_argument("--data", type=Path, required=True, help="folder that the recipe's paths are in")
    parser.add_argument("--output", type=Path, required=True, help="Hugging Face folder to write")
    add_settings(parser.add_mutually_exclusive_group(), PretrainSettings, only=STARTS)
    add_settings(parser, Budget)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="finish the interrupted stretch, or add one to the state before the last one's decay",
    )
    add_settings(parser, RunOptions, only=("force",))
    add_settings(parser, PretrainSettings, only=OTHERS)
    add_device(parser)
    parser.add_argument("--json", action="store_true", help=RECORDS_HELP)
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> int:
    """Train one stretch."""
    from ss_device.training.pretrain import pretrain
    from ss_device.training.progress import training_progress
    from ss_device.training.recipe import load_recipe
    from ss_device.training.run_folder import writing

    recipe = load_recipe(arguments.recipe)
    settings, options = settings_of(arguments, PretrainSettings), settings_of(arguments, RunOptions)
    budget = _budget(settings_of(arguments, Budget), recipe.schedule.steps)
    with writing(arguments.output), training_progress(recipe.name, arguments.json) as report:
        pretrain(recipe, arguments.data, arguments.output, budget, settings, options, report)
    return 0


def _budget(given: Budget, steps: int) -> Budget | None:
    """The budget asked for, of the recipe's `steps` where it has no length; None where none was."""
    if given.steps and given.minutes:
        raise UserError("--steps and --minutes exclude each other")
    if given == Budget():
        return None
    return given if given.steps or given.minutes else replace(given, steps=steps)
