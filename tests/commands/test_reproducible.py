"""The same inputs make the same bundle, byte for byte, in another process and under another name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ss_convert.command import main as ss_convert
from ss_device.adapter import save_adapter
from ss_device.config import SpeculativeConfig
from tests.tiny_models import make_tiny_base, random_adapter

CONFIG = SpeculativeConfig(num_streams=2, num_msa_layers=1, pruning_rank=4)
RUN = "import sys; from ss_convert.command import main; sys.exit(main(sys.argv[1:]))"
SIZES = ("--nodes", "4", "--keep", "3", "--context", "24", "--chunk", "4", "--target", "all")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_two_conversions_of_the_same_inputs(tmp_path):
    base = make_tiny_base(tmp_path / "models/base/tiny-base", dtype="float16", num_hidden_layers=2)
    adapter = tmp_path / "models/adapters/tiny"
    save_adapter(random_adapter(base, CONFIG), base.architecture, adapter)
    (adapter / "golden_prompts.jsonl").write_text('{"prompt": "SELECT a"}\n')
    command = ["--adapter", "tiny", "--models", str(tmp_path / "models"), *SIZES, "--output"]
    first, second = tmp_path / "first", tmp_path / "elsewhere" / "second"
    assert ss_convert([*command, str(first)]) == 0
    environment = os.environ | {"PYTHONHASHSEED": "1", "TMPDIR": str(tmp_path)}
    again = [sys.executable, "-c", RUN, *command, str(second)]
    subprocess.run(again, env=environment, check=True, capture_output=True)
    ours, theirs = contents(first), contents(second)
    assert sorted(ours) == sorted(theirs)
    assert [name for name in ours if ours[name] != theirs[name]] == []
    names = " ".join(ours)
    for part in ("model.mlmodel", "weight.bin", "Manifest.json", ".mlxfn", "golden/tiny.json"):
        assert part in names
    [package] = first.glob("coreml/*.mlpackage")
    raw = json.loads((package / "Manifest.json").read_text())
    assert raw["rootModelIdentifier"] in raw["itemInfoEntries"] and len(raw["itemInfoEntries"]) == 2
