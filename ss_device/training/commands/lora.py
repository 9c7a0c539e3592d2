"""ss-train lora: plain LoRA fine-tuning without streams, the quality baseline."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from ss_device.settings import add_settings, settings_of
from ss_device.training.commands.common import add_application
from ss_device.training.schedule import AdapterSchedule
from ss_device.training.settings import ExampleSettings, LoRASettings, RunOptions

SCHEDULE = ("epochs", "learning_rate", "tokens_per_batch", "seed")
"""What of an adapter's schedule a plain LoRA has."""


def add(commands) -> None:
    """Its place among the sub-commands."""
    parser = commands.add_parser(
        "lora",
        help="plain LoRA fine-tuning without streams: the quality baseline, a PEFT folder",
        example="ss-train lora sqlctx --base models/base/mine --data train.jsonl --output runs/lora",
    )
    add_application(parser)
    parser.add_argument("--output", type=Path, required=True, help="PEFT folder to write")
    add_settings(parser, LoRASettings)
    add_settings(parser, ExampleSettings)
    add_settings(parser, AdapterSchedule, only=SCHEDULE)
    add_settings(parser, RunOptions)
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> int:
    """Train it and write the PEFT folder."""
    from ss_device.training.chat_template import application_and_base
    from ss_device.training.examples import read_examples
    from ss_device.training.finetune import train_lora
    from ss_device.training.progress import training_progress
    from ss_device.training.run_folder import writing

    app, base = application_and_base(arguments.app, arguments.base)
    schedule, options = settings_of(arguments, AdapterSchedule), settings_of(arguments, RunOptions)
    examples = settings_of(arguments, ExampleSettings)
    documents = read_examples(app, base, arguments.data, examples, schedule.seed)
    settings = settings_of(arguments, LoRASettings)
    with writing(arguments.output), training_progress(f"{app.name}: LoRA", arguments.json) as report:
        train_lora(base, app, settings, schedule, documents, arguments.output, options, report)
    return 0
