"""A slice of the campaigns (docs/fault_injection.md): kills, refusals and races of a few commands.

A process of its own: forked children of one that has computed with torch or MLX would stand still.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.faults.inputs import REPOSITORY
from tests.faults.snapshots import Volatile, differences, same
from tests.faults.system_calls import why_not_here

here = pytest.mark.skipif(why_not_here() is not None, reason=str(why_not_here()))


def campaign(*words: str) -> dict[str, list[dict]]:
    """What the campaign found; everything is as it should be when its exit code is 0."""
    paths = [str(REPOSITORY / name) for name in (".", "convert", "runtime")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.faults", *words, "--json"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment)
    assert result.stdout, result.stderr
    found = json.loads(result.stdout)
    assert result.returncode == 0, [entry["failures"] for entries in found.values() for entry in entries]
    return found


@here
def test_killed_at_every_renaming_and_here_and_there():
    [into, over, adapter] = campaign(
        "kills", "--every", "40", "--command", "into-mlx", "--command", "convert-over-mlx",
        "--command", "adapter",
    )["kills"]  # fmt: skip
    for entry, least in ((into, 50), (over, 50), (adapter, 100)):
        assert entry["points"] > least and entry["states"] > 1
        assert entry["states"] == entry["survived"] == entry["identical"]


@here
def test_refused_writes_and_races():
    found = campaign(
        "refusals", "races", "--every", "9", "--command", "convert-mlx", "--command", "bigram-bias",
        "--rounds", "3", "--race", "into-two", "--race", "tune-two",
    )  # fmt: skip
    assert sum(entry["states"] for entry in found["refusals"]) > 5
    assert sum(entry["rounds"] for entry in found["races"]) == 6


def test_what_counts_as_a_difference():
    volatile = Volatile()
    one = {"a.json": b'{"x": 1, "seconds": 2, "id": "q"}', "b": b"1"}
    volatile.learn(one, {"a.json": b'{"x": 1, "seconds": 3, "id": "r"}', "b": b"1"})
    assert not volatile.files and volatile.values == {"a.json": {"0/id"}}
    assert same(b'{"x": 1, "id": "s"}', b'{"x": 1, "seconds": 1, "id": "t"}', "a.json", volatile)
    assert differences(one, {**one, "b": b"2", "c": b""}, volatile) == ["c is left over", "b differs"]
    assert differences(one, {"b": b"1"}, volatile) == ["a.json is missing"]


def test_no_command_is_left_out():
    """Every sub-command that writes has its place among the commands under test."""
    from ss_device.training.command import build_parser
    from tests.faults.commands import COMMANDS

    [commands] = [a for a in build_parser()._actions if a.dest == "command"]
    tested = {command.arguments[0] for command in COMMANDS.values()}
    assert set(commands.choices) - tested == {"evaluate", "score"}  # they write nothing
