"""`python -m tests.soak`: random tiny models, drafted text against plain; and a server under load."""

from __future__ import annotations

import argparse
import json
import sys
import time

from tests.soak.memory import MemoryTrace
from tests.soak.texts import Counts, Mismatch

SHOWN_SECONDS = 20


def main(argv: list[str] | None = None) -> int:
    """Exit code 1 for a mismatch that rounding does not explain, growing memory or a server's problem."""
    arguments = _parser().parse_args(argv)
    _quiet()
    minutes = arguments.minutes or (1.0 if arguments.cases is None else float("inf"))
    share = 0.5 if arguments.server else 1.0
    if arguments.replay:
        seed, _, index = arguments.replay.partition(":")
        counts, memory = _soak(int(seed), int(index), 1, None)
    else:
        counts, memory = _soak(arguments.seed, arguments.first, arguments.cases, share * minutes)
    served = None
    if arguments.server:
        from tests.soak.server import soak_server

        served = soak_server(arguments.seed, min(0.5 * minutes, arguments.minutes or 1.0))
    _print(counts, memory, served, arguments.json)
    sound = not counts.unexplained and memory.is_flat()
    return 0 if sound and (served is None or not served.problems and served.memory.is_flat()) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, help="how long in all (default: 1, unless --cases is given)")
    add("--cases", type=int, help="at most so many models")
    add("--seed", type=int, default=0)
    add("--first", type=int, default=0, metavar="INDEX", help="go on with this case")
    add("--server", action="store_true", help="half of the time: a server under load")
    add("--json", action="store_true", help="print one JSON object")
    add("--replay", metavar="SEED:INDEX", help="one case")
    return parser


def _quiet() -> None:
    """No progress bars and notices of libraries between the lines."""
    from ss_device.command_line import quiet_libraries

    quiet_libraries()
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _soak(seed: int, first: int, cases: int | None, minutes: float | None) -> tuple[Counts, MemoryTrace]:
    from tests.soak.cases import run_case
    from tests.soak.models import make_setting

    counts, memory, started, index = Counts(), MemoryTrace(), time.monotonic(), first
    shown = started
    try:
        while cases is None or index < first + cases:
            if minutes is not None and time.monotonic() - started > 60 * minutes:
                break
            try:
                run_case(make_setting(seed, index), counts, _report)
            except Exception as error:
                raise RuntimeError(f"case {seed}:{index} ({make_setting(seed, index).label()})") from error
            memory.sample()
            index += 1
            if time.monotonic() - shown > SHOWN_SECONDS:
                shown = time.monotonic()
                print(f"{seed}:{index} {_text(counts)}; memory {memory.line()}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"ended; go on with --seed {seed} --first {index}", file=sys.stderr)
    return counts, memory


def _report(mismatch: Mismatch) -> None:
    print(mismatch.line(), file=sys.stderr)


def _text(counts: Counts) -> str:
    return (
        f"{counts.cases} models, {counts.texts} texts, {counts.tokens} tokens in {counts.calls} calls, "
        f"{counts.drafted} drafted, {counts.reused} prompt tokens reused, {counts.refused} refused; "
        f"differing within rounding: {counts.near_ties} near ties, {counts.near_edges} draws near an edge; "
        f"not explained: {len(counts.unexplained)}"
    )


def _print(counts: Counts, memory: MemoryTrace, served, as_json: bool) -> None:
    if as_json:
        server = served and {"counts": dict(served.counts), "problems": served.problems}
        print(json.dumps({**counts.to_dict(), "memory": memory.samples, "server": server}))
        return
    print(_text(counts))
    for reason, count in counts.reasons.most_common():
        print(f"refused {count} times: {reason}")
    print(f"memory: {memory.line()}{'' if memory.is_flat() else ': NOT FLAT'}")
    if served is not None:
        print("server:", ", ".join(f"{name} {count}" for name, count in sorted(served.counts.items())))
        print(f"server's memory: {served.memory.line()}{'' if served.memory.is_flat() else ': NOT FLAT'}")
        for problem in served.problems:
            print(f"server: PROBLEM: {problem}")


if __name__ == "__main__":
    raise SystemExit(main())
