"""examples/train.py, as a reader starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ss_device.adapter import load_adapter
from tests.tiny_models import make_tiny_base

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/train.py"


def test_it_trains_and_prints_the_prediction(tmp_path):
    make_tiny_base(tmp_path / "base", num_hidden_layers=4)
    rows = [{"question": f"q{i}?", "context": "CREATE TABLE t", "answer": f"SELECT {i}"} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--base", tmp_path / "base", "--data", tmp_path / "rows.jsonl", "--output", tmp_path / "out"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, EXAMPLE, *words, "--limit", "10", "--epochs", "1"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    adapter = load_adapter(tmp_path / "out")
    assert adapter.app == "sqlctx" and adapter.record["documents"] == 9
    said = done.stdout.splitlines()[-1]
    assert said == f"tokens per call on held-out rows: {adapter.record['validation']['tokens_per_call']}"


def test_it_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 25
