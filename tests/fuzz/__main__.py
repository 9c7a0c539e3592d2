"""`python -m tests.fuzz`: give damaged files to every command and count what becomes of it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from tests.fuzz import child
from tests.fuzz.campaign import LIMIT, Tally, open_sandbox, run_campaign, run_case
from tests.fuzz.cases import damage, make_case
from tests.fuzz.commands import COMMANDS
from tests.fuzz.inputs import default_folder, ready_inputs
from tests.fuzz.kept import Finished, kept_case
from tests.fuzz.kinds import KINDS
from tests.fuzz.report import print_case, print_tally, printable, to_dict

SHOWN_EVERY = 500


def main(argv: list[str] | None = None) -> int:
    """Exit code 1 when a defect was found."""
    arguments = _parser().parse_args(argv)
    inputs = ready_inputs(arguments.inputs.resolve(), arguments.rebuild)
    child.import_everything()
    if arguments.replay:
        return _replay(arguments, inputs)
    minutes = arguments.minutes
    if minutes is None and arguments.cases is None:
        minutes = 1.0
    tally = run_campaign(
        inputs, arguments.seed, arguments.cases, minutes, _progress,
        kind=arguments.kind, command=arguments.command, limit=arguments.limit, keep=arguments.keep,
        first=arguments.first,
    )  # fmt: skip
    if arguments.json:
        print(json.dumps(to_dict(tally, arguments.seed)))
    else:
        print_tally(tally, Console(width=180, highlight=False))
    return 1 if tally.defects else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, help="how long (default: 1, unless --cases is given)")
    add("--cases", type=int, help="how many cases")
    add("--seed", type=int, default=0)
    add("--first", type=int, default=0, metavar="INDEX", help="number of the first case")
    add("--kind", choices=KINDS, help="only files of one kind")
    add("--command", choices=COMMANDS, help="only one command")
    add("--json", action="store_true", help="print one JSON object")
    add("--keep", type=Path, metavar="FOLDER", help="keep the damaged file and the output of every defect")
    add("--limit", type=float, default=LIMIT, metavar="SECONDS", help="most that a command may take")
    add(
        "--inputs",
        type=Path,
        default=default_folder(),
        metavar="FOLDER",
        help="sound files, built if missing",
    )
    add("--rebuild", action="store_true", help="build the sound files again")
    add(
        "--replay",
        metavar="SEED:INDEX|FOLDER",
        help="run and show one case, by its number (--kind and --command as then) or as --keep kept it",
    )
    return parser


def _progress(finished: Finished, is_new: bool, tally: Tally) -> None:
    """New defects as they come, and a line now and then."""
    if is_new:
        said = printable(finished.outcome.said)[:140]
        print(f"{finished.case.id} {finished.outcome.signature}: {said}", file=sys.stderr)
    if tally.cases % SHOWN_EVERY == 0:
        print(f"{tally.cases} cases, {len(tally.defects)} distinct defects", file=sys.stderr)


def _replay(arguments: argparse.Namespace, inputs: Path) -> int:
    case, harm = _named_case(arguments)
    with open_sandbox(inputs) as sandbox:
        finished = run_case(case, sandbox, arguments.limit, arguments.keep, harm)
    print_case(finished, Console(width=180, highlight=False))
    return 1 if finished.outcome.is_defect else 0


def _named_case(arguments: argparse.Namespace):
    if Path(arguments.replay).is_dir():
        return kept_case(Path(arguments.replay))
    seed, _, index = arguments.replay.partition(":")
    return make_case(int(seed), int(index), arguments.kind, arguments.command), damage


if __name__ == "__main__":
    raise SystemExit(main())
