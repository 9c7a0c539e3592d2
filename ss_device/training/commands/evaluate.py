"""ss-train evaluate: tokens per call, acceptance by depth and task metric of an adapter."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from ss_device.command_line import add_device
from ss_device.evaluation.settings import EvaluationSettings
from ss_device.settings import add_settings, settings_of
from ss_device.training.commands.common import RESULT_HELP, add_base_and_data, print_result


def add(commands) -> None:
    """Its place among the sub-commands."""
    parser = commands.add_parser(
        "evaluate",
        help="tokens per call, acceptance by depth and task metric of an adapter, on the reference",
        example="ss-train evaluate models/adapters/sqlctx --base models/base/mine --data test.jsonl",
    )
    parser.add_argument("adapter", type=Path, help="adapter folder")
    add_base_and_data(parser)
    add_settings(parser, EvaluationSettings)
    add_device(parser)
    parser.add_argument("--json", action="store_true", help=RESULT_HELP)
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> int:
    """Decode the prompts and print what happened."""
    from ss_device.evaluation.report import evaluate_adapter

    settings = settings_of(arguments, EvaluationSettings)
    result = evaluate_adapter(arguments.adapter, arguments.base, arguments.data, settings, arguments.device)
    print_result(result, arguments.json)
    return 0
