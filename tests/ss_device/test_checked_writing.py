"""A system that takes fewer bytes than it was given is an error that names the file."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from ss_device.checked_writing import checked_file
from ss_device.checkpoint_weights import stored_tensors, write_stored, write_tensors

VALUES = np.arange(20_000, dtype=np.float16)
# A write beyond the limit is refused; Python ignores the signal that would end the process.
LIMITED = """
import resource, sys
from pathlib import Path
import numpy as np
from ss_device.checkpoint_weights import stored_tensors, write_stored, write_tensors
kind, limit, target, source = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    if kind == "tensors":
        write_tensors(target, {"a": (20_000,)}, lambda name: np.arange(20_000, dtype=np.float16))
    else:
        write_stored(target, stored_tensors(source))
except OSError as error:
    print(error.errno, error.filename)
else:
    print("no error", target.stat().st_size)
"""


@pytest.mark.parametrize("kind", ["tensors", "stored"])
def test_a_file_that_is_cut_is_not_taken_for_whole(tmp_path, kind):
    """By less than a buffer: the C library keeps so much back until the file is closed."""
    whole, target = tmp_path / "whole.safetensors", tmp_path / "cut.safetensors"
    write_tensors(whole, {"a": VALUES.shape}, lambda name: VALUES)
    size = whole.stat().st_size
    for limit in (size - 1, size - 3000, 100):
        command = [sys.executable, "-c", LIMITED, kind, str(limit), str(target), str(whole)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.stdout == f"27 {target}\n", result


def test_what_is_written_is_what_was_given(tmp_path):
    file = tmp_path / "a.safetensors"
    turned = VALUES.reshape(100, 200).T  # not contiguous
    write_tensors(file, {"a": turned.shape, "b": (0,)}, lambda n: turned if n == "a" else VALUES[:0])
    stored = stored_tensors(file)
    np.testing.assert_array_equal(stored["a"].read(), turned)
    write_stored(tmp_path / "b.safetensors", stored)
    assert (tmp_path / "b.safetensors").read_bytes() == file.read_bytes()
    with pytest.raises(OSError, match="no-such-folder"), checked_file(tmp_path / "no-such-folder" / "a"):
        pass
