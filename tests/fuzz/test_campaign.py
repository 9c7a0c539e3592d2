"""The campaign itself: it notices what it is for, repeats its cases, and a slice of it finds nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from random import Random

import pytest

from tests.fuzz import child, commands
from tests.fuzz.campaign import run_case
from tests.fuzz.cases import Case, file_of, make_case
from tests.fuzz.commands import COMMANDS, Command
from tests.fuzz.inputs import REPOSITORY
from tests.fuzz.json_mutations import mutate_json
from tests.fuzz.kept import kept_case
from tests.fuzz.kinds import KINDS
from tests.fuzz.misbehaving import WAYS
from tests.fuzz.outcome import judge
from tests.fuzz.sandbox import Sandbox, changes
from tests.fuzz.tensor_mutations import joined, mutate_tensors

SLICE, SEED = 150, 7


@pytest.fixture(scope="module")
def sandbox(inputs, tmp_path_factory):
    return Sandbox(inputs, tmp_path_factory.mktemp("sandbox"))


def run_slice(inputs, *arguments: object) -> subprocess.CompletedProcess:
    """The campaign in a process of its own: this one has threads that no child would have."""
    command = [sys.executable, "-m", "tests.fuzz", "--inputs", inputs, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        [str(word) for word in command], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )


@pytest.mark.heavy
def test_a_slice_of_the_campaign_finds_nothing(inputs):
    ended = run_slice(inputs, "--cases", SLICE, "--seed", SEED)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]


def test_one_case_is_replayed(inputs):
    ended = run_slice(inputs, "--replay", f"{SEED}:0")
    case = make_case(SEED, 0)
    assert case.path in ended.stdout and "--- stderr" in ended.stdout, ended.stderr


@pytest.mark.parametrize("way", WAYS)
def test_every_outcome_is_noticed(sandbox, monkeypatch, way):
    monkeypatch.setitem(commands.PROGRAMS, "misbehaving", "tests.fuzz.misbehaving")
    arguments = (way, "--json") if way == "badjson" else (way,)
    monkeypatch.setitem(COMMANDS, "misbehaving", Command("misbehaving", arguments))
    case = Case(0, 0, "training rows", "misbehaving", "data/rows.jsonl", "", False)
    before = sandbox.snapshot()
    sandbox.watch_canaries()
    try:
        ended = child.run(case.command, sandbox, 2.0 if way == "hang" else 30.0)
        changed = changes(before, sandbox.snapshot())
        outcome = judge(case, "answer removed", ended, changed, sandbox.read_canaries(), True)
        assert outcome.name == way, (outcome, ended)
        if way in ("traceback", "crash", "hang"):
            assert "misbehaving.py" in outcome.detail
    finally:
        sandbox.restore()
    assert {n: e[:2] for n, e in sandbox.snapshot().items()} == {n: e[:2] for n, e in before.items()}


def test_a_kept_case_runs_again(sandbox, monkeypatch, tmp_path):
    """Whatever seeds mean by then: the damaged file itself was kept."""
    monkeypatch.setitem(commands.PROGRAMS, "misbehaving", "tests.fuzz.misbehaving")
    monkeypatch.setitem(COMMANDS, "misbehaving", Command("misbehaving", ("traceback",)))
    case, damaged = Case(4, 2, "training rows", "misbehaving", "data/rows.jsonl", "", True), b"other rows"

    def harm(case: Case, sandbox: Sandbox) -> str:
        file_of(case, sandbox).write_bytes(damaged)
        return "other rows"

    first = run_case(case, sandbox, 30.0, tmp_path, harm)
    again, harm_again = kept_case(tmp_path / "4-2")
    assert again == case and (tmp_path / "4-2" / "damaged.rows.jsonl").read_bytes() == damaged
    second = run_case(again, sandbox, 30.0, None, harm_again)
    assert second.outcome == first.outcome and second.what == "other rows"


def test_cases_are_determined_by_seed_and_index():
    assert [make_case(3, i) for i in range(50)] == [make_case(3, i) for i in range(50)]
    assert make_case(3, 1, kind="tuning").kind == "tuning"
    assert make_case(3, 1, command="audit").command_name == "audit"


def test_every_kind_is_read_by_known_commands():
    for name, kind in KINDS.items():
        assert set(kind.commands) <= set(COMMANDS), name
    used = {command for kind in KINDS.values() for command in kind.commands}
    assert used == set(COMMANDS)


def test_sound_commands_are_well(sandbox):
    """Without damage the files are fine; the commands themselves run in the slice."""
    for kind in KINDS.values():
        for path in kind.paths:
            assert (sandbox.work / path).is_file(), path


def test_mutations_change_what_they_say():
    sound = json.dumps({"a": [1, 2.5, {"b": "c"}], "d": None}).encode()
    changed = [mutate_json(sound, Random(seed)) for seed in range(200)]
    assert all(what for _, what in changed)
    assert len({text for text, _ in changed}) > 100
    header = {"x": {"dtype": "F16", "shape": [2, 2], "data_offsets": [0, 8]}}
    files = {mutate_tensors(joined(header, bytes(8)), Random(seed))[0] for seed in range(200)}
    assert len(files) > 60
