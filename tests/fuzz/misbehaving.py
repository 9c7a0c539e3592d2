"""A program that does what no command may do: the campaign must notice every one of these."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def main(arguments: list[str]) -> int:
    """What the first argument says."""
    return WAYS[arguments[0]]()


def _refuse() -> int:
    print("error: data/rows.jsonl: not what was expected", file=sys.stderr)
    return 2


def _raise() -> int:
    raise KeyError("rows")


def _crash() -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def _hang() -> int:
    time.sleep(60)
    return 0


def _use_memory() -> int:
    return len(bytearray(1 << 40))


def _escape() -> int:
    Path("../canary/new.txt").write_text("escaped")
    return 0


def _read_outside() -> int:
    Path("canary/canary.txt").read_text()
    return 0


def _lose() -> int:
    Path("out/earlier/manifest.json").unlink()
    return _refuse()


def _say_control() -> int:
    print("error: data/rows.jsonl: \x1b[31mred", file=sys.stderr)
    return 2


def _say_much() -> int:
    print("notice: something", file=sys.stderr)
    return _refuse()


def _name_nothing() -> int:
    print("error: no", file=sys.stderr)
    return 2


def _expect_nothing() -> int:
    print("error: unexpected KeyError", file=sys.stderr)
    return 2


def _print_nan() -> int:
    print('{"a": NaN}')
    return 0


WAYS = {
    "refused": _refuse,
    "traceback": _raise,
    "crash": _crash,
    "hang": _hang,
    "memory": _use_memory,
    "escape": _escape,
    "outside": _read_outside,
    "lost": _lose,
    "control": _say_control,
    "noisy": _say_much,
    "unnamed": _name_nothing,
    "unexpected": _expect_nothing,
    "badjson": _print_nan,
}
