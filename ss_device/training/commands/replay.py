"""ss-train replay: tokens per call of many trees at once, read off the model's own text."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from ss_device.command_line import add_device, print_json
from ss_device.draft_choice import DraftChoice
from ss_device.evaluation.settings import ReplaySettings
from ss_device.settings import add_settings, settings_of
from ss_device.training.commands.common import RESULT_HELP, add_base_and_data


def add(commands) -> None:
    """Its place among the sub-commands."""
    parser = commands.add_parser(
        "replay",
        help="tokens per call of many trees at once, read off the model's own text",
        example="ss-train replay models/adapters/sqlctx --base models/base/mine --data test.jsonl "
        "--continuations own_test.jsonl --tree best-first:32 --tree chain:5",
    )
    parser.add_argument("adapter", type=Path, help="adapter folder")
    add_base_and_data(parser)
    parser.add_argument(
        "--continuations", type=Path, required=True, help="the model's own text; written if missing"
    )
    parser.add_argument(
        "--tree", action="append", metavar="SHAPE:NODES[:STREAMS]", help="default best-first:32"
    )
    add_settings(parser, ReplaySettings)
    add_device(parser)
    parser.add_argument("--json", action="store_true", help=RESULT_HELP)
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> int:
    """Replay the trees and print a line for each."""
    from ss_device.evaluation.replay_report import replay_adapter
    from ss_device.training.progress import training_progress

    trees = {"trees": tuple(map(DraftChoice.parse, arguments.tree))} if arguments.tree else {}
    settings = settings_of(arguments, ReplaySettings, **trees)
    with training_progress("replay", as_json=False) as report:
        result = replay_adapter(
            arguments.adapter, arguments.base, arguments.data, arguments.continuations, settings,
            report=report, device=arguments.device,
        )  # fmt: skip
    if arguments.json:
        print_json(result)
        return 0
    for tree, summary in result["trees"].items():
        depths = " ".join(f"{a:.2f}" for a in summary["acceptance_by_depth"])
        plain = summary["without_repetition"]["tokens_per_call"]
        print(
            f"{tree:20} {summary['tokens_per_call']:.2f} tokens per call "
            f"({plain:.2f} where the text does not repeat itself)   by depth {depths}"
        )
    return 0
