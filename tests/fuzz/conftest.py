"""The sound files of the fuzzing tests, built once for all workers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from filelock import FileLock

from tests.fuzz.inputs import ready_inputs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Path:
    """Read only: see `tests.fuzz.inputs`."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with FileLock(shared / "fuzz-inputs.lock"):
        return ready_inputs(shared / "fuzz-inputs")
