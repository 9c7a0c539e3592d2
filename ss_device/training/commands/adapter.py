"""ss-train adapter: train an adapter on a frozen base."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from ss_device.settings import add_settings, settings_of
from ss_device.training.commands.common import add_application
from ss_device.training.schedule import AdapterSchedule
from ss_device.training.settings import AdapterInputs, RunOptions

EXAMPLE = (
    "ss-train adapter sqlctx --base models/base/ss-demo-base --data train.jsonl "
    "--settings plus --output models/adapters/sqlctx"
)


def add(commands) -> None:
    """Its place among the sub-commands."""
    parser = commands.add_parser("adapter", help="train an adapter on a frozen base", example=EXAMPLE)
    add_application(parser)
    parser.add_argument("--output", type=Path, required=True, help="adapter folder to write")
    parser.add_argument(
        "--settings",
        default="paper",
        help="paper, plus (bigram bias and stream LoRA), shared, shared-v2, or a JSON object of settings",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change one of the settings, as --set num_msa_layers=6",
    )
    add_settings(parser, AdapterInputs)
    add_settings(parser, AdapterSchedule)
    add_settings(parser, RunOptions)
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> int:
    """Train it as Python callers do (`ss_device.train_adapter`), with progress."""
    from ss_device.application import load_application
    from ss_device.python_api import train_adapter
    from ss_device.training.presets import changes_of
    from ss_device.training.progress import training_progress

    app, changes = load_application(arguments.app), changes_of(arguments.set)
    with training_progress(f"{app.name}: adapter", arguments.json) as report:
        train_adapter(
            app,
            arguments.base,
            arguments.data,
            arguments.output,
            settings=arguments.settings,
            schedule=settings_of(arguments, AdapterSchedule),
            changes=changes,
            inputs=settings_of(arguments, AdapterInputs),
            device=arguments.device,
            resume=arguments.resume,
            force=arguments.force,
            report=report,
        )
    return 0
