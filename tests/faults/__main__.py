"""python -m tests.faults: kills, refusals and races of every command. Exit code 1 where something fails.

    python -m tests.faults kills --command into --every 5
    python -m tests.faults kills --command base --point 84h
    python -m tests.faults refusals --command convert-mlx
    python -m tests.faults races --rounds 20 --seed 1
    python -m tests.faults interleaved --race into-two
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.commands import COMMANDS
from tests.faults.inputs import make_inputs
from tests.faults.kills import Outcome, every, kill_everywhere
from tests.faults.processes import preload
from tests.faults.race_list import RACES
from tests.faults.races import Tally, at_random, interleaved
from tests.faults.reference import Place
from tests.faults.refusals import REFUSALS, refuse_everywhere
from tests.faults.report import as_json, failure_lines, race_table, table
from tests.faults.system_calls import why_not_here

IN_MEMORY = Path("/dev/shm")
CAMPAIGNS = ("kills", "refusals", "interleaved", "races")


def parser() -> argparse.ArgumentParser:
    """Options of all campaigns."""
    made = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.splitlines()[0])
    names = ", ".join(CAMPAIGNS)
    made.add_argument("campaign", nargs="*", metavar="CAMPAIGN", help=f"{names} (default: all)")
    made.add_argument("--command", action="append", choices=COMMANDS, help="may be repeated (default: all)")
    made.add_argument("--race", action="append", choices=RACES, help="may be repeated (default: all)")
    made.add_argument("--point", metavar="K", help="one point: what stands behind @ or # in a failure's id")
    made.add_argument(
        "--every", type=int, default=1, metavar="N",
        help="every N-th operation, and all that give a result its name (default 1)",
    )  # fmt: skip
    made.add_argument("--rounds", type=int, default=12, help="of each race at random (default 12)")
    made.add_argument("--seed", type=int, default=0, help="of the races at random")
    made.add_argument("--work", type=Path, help="folder to work in (default: in memory)")
    made.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the campaigns; 1 where something failed, 2 where they cannot run."""
    arguments = parser().parse_args(argv)
    chosen = arguments.campaign or list(CAMPAIGNS)
    unknown = [name for name in chosen if name not in CAMPAIGNS]
    reason = f"no campaign '{unknown[0]}'" if unknown else why_not_here()
    if reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    preload()
    parent = IN_MEMORY if IN_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="faults-", dir=arguments.work or parent) as folder:
        place = Place(Path(folder), make_inputs(Path(folder) / "inputs"))
        found = {name: _campaign(name, arguments, place) for name in chosen}
    if arguments.json:
        print(json.dumps({name: as_json(entries) for name, entries in found.items()}))
    return int(any(entry.failures for entries in found.values() for entry in entries))


def _campaign(name: str, arguments: argparse.Namespace, place: Place) -> list[Outcome] | list[Tally]:
    """Run one campaign and show what it found."""
    found = []
    for step in _steps(name, arguments, place):
        started = time.monotonic()
        entry = step()
        found.append(entry)
        if not arguments.json:
            shown = table([entry]) if isinstance(entry, Outcome) else race_table([entry])
            print(f"{shown.splitlines()[-1]} {time.monotonic() - started:.0f} s", flush=True)
            print(failure_lines(entry.failures), flush=True, end="\n" if entry.failures else "")
    if not arguments.json:
        print(f"\n## {name}\n\n{(race_table if name in CAMPAIGNS[2:] else table)(found)}\n", flush=True)
    return found


def _steps(name: str, arguments: argparse.Namespace, place: Place) -> list[Callable]:
    """One call per command or race."""
    point = arguments.point
    commands = [COMMANDS[command] for command in arguments.command or COMMANDS]
    races = [RACES[race] for race in arguments.race or RACES]
    chosen = every(arguments.every)
    if name == "kills":
        return [lambda c=c: kill_everywhere(c, place, chosen, point) for c in commands]
    if name == "refusals":
        pairs = [(c, r) for c in commands for r in REFUSALS]
        return [lambda c=c, r=r: refuse_everywhere(c, place, r, chosen, point) for c, r in pairs]
    number = None if point is None else int(point.rpartition(":")[2])
    if name == "interleaved":
        return [lambda r=r: interleaved(r, place, arguments.every, number) for r in races]
    return [lambda r=r: at_random(r, place, arguments.rounds, arguments.seed, number) for r in races]


if __name__ == "__main__":
    sys.exit(main())
