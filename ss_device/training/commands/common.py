"""What several sub-commands share: their arguments and printed results."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from ss_device.command_line import add_device, print_json

BASE_HELP = "base model: a folder, a name under models/base, or an id on the Hugging Face hub"
DATA_HELP = "JSON lines with the app's fields, or hub or hub:SPLIT for the app's data set"
RECORDS_HELP = "log records as JSON lines on stdout"
RESULT_HELP = "one JSON object on stdout"


def add_application(parser: ArgumentParser) -> None:
    """An application, a base, data of the application, and where that is computed."""
    parser.add_argument("app", help="application: a folder under apps/ or $SS_APPS, or its path")
    add_base_and_data(parser)
    add_device(parser)
    parser.add_argument("--json", action="store_true", help=RECORDS_HELP)


def add_base_and_data(parser: ArgumentParser) -> None:
    """`--base` and `--data`."""
    parser.add_argument("--base", type=Path, required=True, help=BASE_HELP)
    parser.add_argument("--data", required=True, help=DATA_HELP)


def print_result(result: dict, as_json: bool) -> None:
    """Names and values, or one JSON object."""
    if as_json:
        print_json(result)
        return
    for name, value in result.items():
        print(f"{name:30} {value}")
