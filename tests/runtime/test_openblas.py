"""How many threads OpenBLAS gets: one constant, unless the environment says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ss_runtime.backends import OPENBLAS_THREADS, THREAD_VARIABLES

CODE = """
import os
from ss_runtime.backends import blas_threads
print(blas_threads(), os.environ.get("OPENBLAS_NUM_THREADS"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Debian's OpenBLAS is loaded on Linux alone")
@pytest.mark.parametrize("given", [{}, {"OPENBLAS_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1"}])
def test_the_environment_comes_first(given):
    clean = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    run = subprocess.run(
        [sys.executable, "-c", CODE], env={**clean, **given}, capture_output=True, text=True, check=True
    )
    threads, variable = run.stdout.split()
    if threads == "None":  # no OpenBLAS here: nothing is set
        assert variable == given.get("OPENBLAS_NUM_THREADS", "None")
        return
    # OpenBLAS takes no more threads than there are cores.
    assert int(threads) == min(OPENBLAS_THREADS if not given else 1, len(os.sched_getaffinity(0)))
    assert variable == ("None" if "OMP_NUM_THREADS" in given else str(OPENBLAS_THREADS if not given else 1))
