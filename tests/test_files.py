"""Files that are damaged or missing."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from safetensors.numpy import save_file

from ss_device.errors import UserError
from ss_device.files import read_tensors, sha256
from ss_device.strict_json import read_json


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
