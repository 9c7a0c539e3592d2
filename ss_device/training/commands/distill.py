"""ss-train distill: write the base model's own continuations of an application's prompts."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from ss_device.settings import add_settings, settings_of
from ss_device.training.commands.common import add_application
from ss_device.training.settings import DistillSettings


def add(commands) -> None:
    """Its place among the sub-commands."""
    parser = commands.add_parser(
        "distill",
        help="write the base model's own continuations of an application's prompts",
        example="ss-train distill sqlctx --base models/base/mine --data train.jsonl --output own.jsonl",
    )
    add_application(parser)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines file; a rerun continues it")
    add_settings(parser, DistillSettings)
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> int:
    """Continue the prompts that the file does not hold yet."""
    from ss_device.reference.device import chosen_device
    from ss_device.reference.stream_model import load_base
    from ss_device.tokenizer_file import read_tokenizer
    from ss_device.training.chat_template import application_and_base
    from ss_device.training.distill import distill, prompts_of
    from ss_device.training.progress import training_progress
    from ss_device.training.rows import source_identity

    settings, where = settings_of(arguments, DistillSettings), chosen_device(arguments.device)
    app, base = application_and_base(arguments.app, arguments.base)
    settings = replace(settings, stop_strings=app.stop_strings)
    prompts = prompts_of(app, base, arguments.data, settings)
    made_from = {
        "app": app.name,
        "prompt": app.template,
        "base": base.identity.to_dict(),
        "data": source_identity(app, arguments.data),
    }
    with training_progress(f"{app.name}: continuations", arguments.json) as report:
        distill(
            load_base(base, device=where), read_tokenizer(base.path), prompts, arguments.output,
            base.architecture.eos_ids, settings, made_from, report,
        )  # fmt: skip
    return 0
