"""Assets of the same inputs are the same, byte for byte, whatever process writes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("coreai", reason="coreai-core is not installed")

from ss_convert.coreai.asset import write_asset
from ss_convert.coreai.plain_function import plain_function
from ss_convert.coreai_options import coreai_options
from ss_convert.graph.functions import adapter_functions, base_weights
from ss_convert.graph.options import PRESETS, GraphOptions
from ss_device.base_model import open_base
from tests.families.checks import LOSSLESS
from tests.families.tiny import make_base
from tests.tiny_models import random_adapter

CHOICES = {
    "none": {},
    **{name: {"preset": name, **choices} for name, choices in PRESETS.items()},
    "int4": {"weights": "int4", "embedding_weights": "int8"},
    "lut6": {"weights": "lut6"},
}
RUN = "import sys; from tests.convert.coreai.test_same_bytes import write_all; write_all(*sys.argv[1:])"


def write_all(base: str, folder: str) -> None:
    """An asset of every choice: both functions of an adapter, and `main`."""
    opened = open_base(base)
    adapter = random_adapter(opened, LOSSLESS)
    for name, choices in CHOICES.items():
        options = coreai_options(GraphOptions(8, 8, context=64, chunk=8, **choices), None)
        weights = base_weights(opened.architecture, opened.weights(), options)
        functions = [
            *adapter_functions(opened.architecture, weights, adapter, options),
            plain_function(opened.architecture, weights, adapter.config, options),
        ]
        write_asset(functions, Path(folder) / f"{name}.aimodel", {})


# Biases and layer norms; windows and soft caps.
@pytest.mark.parametrize("family", ["phi", "gemma2"])
def test_two_processes_write_the_same(tmp_path, family):
    make_base(family, tmp_path / "base")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        command = [sys.executable, "-c", RUN, str(tmp_path / "base"), str(tmp_path / name)]
        subprocess.run(command, check=True, capture_output=True)
    files = [path.relative_to(tmp_path / "first") for path in (tmp_path / "first").rglob("*.*")]
    assert len([file for file in files if file.name == "main.mlirb"]) == len(CHOICES)
    changed = [
        str(file)
        for file in files
        if (tmp_path / "first" / file).is_file()
        and (tmp_path / "first" / file).read_bytes() != (tmp_path / "second" / file).read_bytes()
    ]
    assert changed == []
