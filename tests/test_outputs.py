"""Outputs appear whole or not at all, and two processes never write the same one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ss_device import outputs
from ss_device.errors import UserError
from ss_device.outputs import file_in_one_go, folder_in_one_go, output_lock, recover_folder, write_text


def write_one_go(target, content, fail=False, **settings):
    with folder_in_one_go(target, **settings) as folder:
        (folder / "file").write_text(content)
        assert not target.exists() or (target / "file").read_text() != content
        if fail:
            raise RuntimeError


def test_folder_appears_whole_and_replaces_the_earlier_one(tmp_path):
    target = tmp_path / "out"
    for content in ("one", "two"):
        write_one_go(target, content)
        assert (target / "file").read_text() == content
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("keep_partial", [False, True])
def test_failure_leaves_the_earlier_folder(tmp_path, keep_partial):
    target = tmp_path / "out"
    write_one_go(target, "one")
    with pytest.raises(RuntimeError):
        write_one_go(target, "two", fail=True, keep_partial=keep_partial)
    assert (target / "file").read_text() == "one"
    partial = tmp_path / ".out.partial"
    assert partial.exists() == keep_partial
    if keep_partial:
        with folder_in_one_go(target, keep_partial=True) as folder:
            assert (folder / "file").read_text() == "two"


def test_leftovers_of_a_killed_run_are_not_mixed_in(tmp_path):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "old").write_text("half")
    write_one_go(tmp_path / "out", "one")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["file"]


def test_a_kill_between_the_two_renames_is_mended_by_the_next_write(tmp_path):
    """The earlier folder comes back before anything else happens, and survives a failing write."""
    (tmp_path / ".result.previous").mkdir()
    (tmp_path / ".result.previous" / "old").write_text("x")
    with pytest.raises(RuntimeError), folder_in_one_go(tmp_path / "result"):
        raise RuntimeError
    assert (tmp_path / "result" / "old").read_text() == "x"


@pytest.fixture(params=["exchange", "two renames"])
def system(request, monkeypatch):
    """With the system's exchange of two names, and without it."""
    if request.param == "two renames":
        monkeypatch.setattr(outputs, "_exchange", lambda one, other: False)
    return request.param


def test_a_folder_takes_the_earlier_ones_place(tmp_path, system):
    target = tmp_path / "out"
    for content in ("one", "two", "three"):
        write_one_go(target, content)
    assert (target / "file").read_text() == "three"
    assert list(tmp_path.iterdir()) == [target]


def test_the_name_is_never_missing_while_folders_are_exchanged(tmp_path, monkeypatch):
    """No rename of the system's takes the earlier folder away first."""
    target = tmp_path / "out"
    write_one_go(target, "one")
    monkeypatch.setattr(os, "replace", lambda *names: pytest.fail("an exchange is to be had"))
    write_one_go(target, "two")
    assert (target / "file").read_text() == "two"


def test_a_symbolic_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "out"
    link.symlink_to(tmp_path / "disk" / "real")
    for content in ("one", "two"):
        write_one_go(link, content)
        assert link.is_symlink()
        assert (tmp_path / "disk" / "real" / "file").read_text() == content
    assert sorted(p.name for p in (tmp_path / "disk").iterdir()) == ["real"]


def test_a_file_is_never_replaced_by_a_folder(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UserError, match="out: is a file, expected a folder"):
        write_one_go(tmp_path / "out", "one")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_the_working_folder_and_those_above_are_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="working folder"), folder_in_one_go(Path(name)):
        pass
    assert list(tmp_path.iterdir()) == []


HOLD = """
import sys, time
from pathlib import Path
from ss_device.outputs import output_lock
with output_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_process_writes_at_a_time_and_a_killed_one_holds_nothing(tmp_path):
    target = tmp_path / "out"
    write_one_go(target, "one")
    command = [sys.executable, "-c", HOLD, str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="out: another process is writing it"):
            write_one_go(target, "two")
        assert (target / "file").read_text() == "one"
        other.kill()
    write_one_go(target, "two")
    assert (target / "file").read_text() == "two"
    assert list(tmp_path.iterdir()) == [target]


def test_a_lock_may_be_taken_again_inside(tmp_path):
    with output_lock(tmp_path / "out"):
        write_one_go(tmp_path / "out", "one")
        assert (tmp_path / ".out.lock").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_the_writer_of_a_file_waits_for_another(tmp_path):
    target = tmp_path / "out.json"
    command = [sys.executable, "-c", HOLD.replace("60", "0.5"), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        other.stdout.readline()
        started = time.monotonic()
        write_text(target, "mine")
        assert time.monotonic() - started > 0.2
    assert target.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [target]


def test_a_failing_writer_leaves_the_earlier_file(tmp_path):
    target = tmp_path / "out.json"
    write_text(target, "one")
    (tmp_path / ".out.json.partial-1-abc.json").write_text("of a killed process")
    with pytest.raises(RuntimeError), file_in_one_go(target) as partial:
        assert partial.suffix == ".json"
        partial.write_text("half")
        raise RuntimeError
    assert target.read_text() == "one"
    assert list(tmp_path.iterdir()) == [target]


def test_recovery_removes_what_was_replaced(tmp_path):
    for name in ("out", ".out.previous"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    recover_folder(tmp_path / "out")
    assert (tmp_path / "out" / "file").read_text() == "out"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
