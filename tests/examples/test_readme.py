"""README's Python runs as it stands, on a small bundle in the place of build/sqlctx."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.runtime.bundles import make_bundle
from tests.runtime.mlx_cases import CONFIGS
from tests.tiny_models import make_tiny_base

ROOT = Path(__file__).resolve().parents[2]


def test_readmes_python_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    bundle = make_bundle(
        tmp_path / "build/sqlctx", make_tiny_base(tmp_path / "base"), {"sqlctx": CONFIGS["paper"]}
    )
    manifest = bundle.path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"{prompt}"', '"{context} {question}"'))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0 and result.stdout, result.stderr
