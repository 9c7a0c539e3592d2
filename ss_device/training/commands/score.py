"""ss-train score: the task metric of a base model or a plain LoRA, one token at a time."""

from __future__ import annotations

from argparse import Namespace

from ss_device.evaluation.settings import ScoreSettings
from ss_device.settings import add_settings, settings_of
from ss_device.training.commands.common import add_application, print_result


def add(commands) -> None:
    """Its place among the sub-commands."""
    parser = commands.add_parser(
        "score",
        help="task metric of a base model or a plain LoRA, one token at a time",
        example="ss-train score sqlctx --base models/base/mine --lora runs/lora --data test.jsonl",
    )
    add_application(parser)
    add_settings(parser, ScoreSettings)
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> int:
    """Answer the prompts and print the metric."""
    from ss_device.evaluation.scoring import score_model
    from ss_device.training.progress import training_progress

    settings = settings_of(arguments, ScoreSettings)
    with training_progress(f"{arguments.app}: answers", as_json=False) as report:
        result = score_model(
            arguments.app, arguments.base, arguments.data, settings,
            lambda record: None if arguments.json else report(record), arguments.device,
        )  # fmt: skip
    print_result(result, arguments.json)
    return 0
