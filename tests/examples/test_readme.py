"""The Python of README and docs/python.md runs as it stands, on a small bundle in build/sqlctx's place."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.bundles import make_bundle
from tests.runtime.mlx_cases import CONFIGS
from tests.tiny_models import make_tiny_base

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    base = make_tiny_base(folder / "base")
    bundle = make_bundle(folder / "build/sqlctx", base, {"sqlctx": CONFIGS["paper"]})
    manifest = bundle.path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"{prompt}"', '"{context} {question}"'))
    return folder


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_pages_python_runs(page, place):
    code = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)[0]
    assert 'load("build/sqlctx", adapter="sqlctx")' in code
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=place)
    assert result.returncode == 0 and result.stdout, result.stderr
