"""examples/convert.py on a tiny base and adapter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ss_device.adapter import save_adapter
from ss_device.bundle import open_bundle
from ss_device.config import SpeculativeConfig
from tests.tiny_models import make_tiny_base, random_adapter

EXAMPLE = Path(__file__).parents[2] / "examples/convert.py"


def test_the_example_makes_a_bundle_and_lists_it(tmp_path):
    base = make_tiny_base(tmp_path / "models/base/tiny-base", dtype="float16")
    adapter = random_adapter(base, SpeculativeConfig(num_streams=2, num_msa_layers=1), app="sqlctx")
    save_adapter(adapter, base.architecture, tmp_path / "models/adapters/sqlctx")
    environment = {**os.environ, "SS_MODELS": str(tmp_path / "models")}
    command = [sys.executable, str(EXAMPLE)]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    bundle = open_bundle(tmp_path / "build/sqlctx", verify=True)
    assert bundle.manifest.made.targets == ("mlx",)
    assert "build/sqlctx: sqlctx" in run.stdout.splitlines()
    assert all(name in run.stdout for name in bundle.manifest.files)
