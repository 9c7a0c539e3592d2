"""The examples that generate run as they stand, on a small bundle with the applications' prompts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ss_device.application import load_application
from tests.runtime.bundles import make_bundle
from tests.runtime.mlx_cases import CONFIGS
from tests.tiny_models import make_tiny_base

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 25


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(bundle of two applications, base folder)."""
    folder = tmp_path_factory.mktemp("examples")
    base = make_tiny_base(folder / "base")
    made = make_bundle(folder / "bundle", base, {"sqlctx": CONFIGS["paper"], "e2e_nlg": CONFIGS["rich"]})
    one = make_bundle(folder / "one", base, {"sqlctx": CONFIGS["paper"]})
    for bundle in (made, one):
        manifest = json.loads((bundle.path / "manifest.json").read_text())
        for name, entry in manifest["adapters"].items():
            entry["prompt_template"] = load_application(name).template
        (bundle.path / "manifest.json").write_text(json.dumps(manifest))
    return folder


def run(name: str, cwd: Path, *arguments: str, stdin: str = "") -> str:
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    result = subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_generate(models):
    assert run("generate.py", models, "one").endswith("\n")


@pytest.mark.parametrize("temperature", [(), ("0.8",)])
def test_stream(models, temperature):
    printed = run("stream.py", models, "one", *temperature)
    assert "tokens in" in printed and "tokens per second" in printed


def test_chat_cache(models, tmp_path):
    printed = run("chat_cache.py", tmp_path, str(models / "base"), stdin="hello\nand again\n")
    assert "tokens in chat.safetensors" in printed and (tmp_path / "chat.safetensors").is_file()


def test_adapters(models):
    printed = run("adapters.py", models, "bundle")
    assert printed.index("sqlctx: ") < printed.index("e2e_nlg: ") < printed.index("base: ")


def test_examples_are_short():
    lengths = {p.name: len(p.read_text().splitlines()) for p in (ROOT / "examples").glob("*.py")}
    assert lengths and all(count <= MOST_LINES for count in lengths.values()), lengths
