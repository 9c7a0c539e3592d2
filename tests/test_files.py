"""Files that are damaged, missing or half written."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from safetensors.numpy import save_file

from ss_device.errors import UserError
from ss_device.files import folder_in_one_go, read_json, read_tensors, sha256


def test_sha256_runs_over_all_files_in_order(tmp_path):
    for name, content in (("a", b"one"), ("b", b"two")):
        (tmp_path / name).write_bytes(content)
    assert sha256(tmp_path / "a", tmp_path / "b") == hashlib.sha256(b"onetwo").hexdigest()
    assert sha256(tmp_path / "b", tmp_path / "a") != sha256(tmp_path / "a", tmp_path / "b")


def test_read_tensors_returns_what_was_saved(tmp_path):
    save_file({"x": np.arange(6, dtype=np.float16).reshape(2, 3)}, tmp_path / "x.safetensors")
    np.testing.assert_array_equal(read_tensors(tmp_path / "x.safetensors")["x"], [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_damaged_tensor_file_is_named(tmp_path, keep):
    file = tmp_path / "x.safetensors"
    save_file({"x": np.zeros(8, np.float32)}, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match="x.safetensors: not a readable safetensors file"):
        read_tensors(file)


def test_missing_files_are_named(tmp_path):
    for read in (read_tensors, read_json):
        with pytest.raises(UserError, match="nothing: no such file"):
            read(tmp_path / "nothing")


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe\x00", b""])
def test_json_that_is_no_object_is_refused(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UserError, match="x.json: (not valid JSON|expected a JSON object)"):
        read_json(tmp_path / "x.json")


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
