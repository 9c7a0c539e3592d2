"""A folder of tiny models and a bundle made from it, shared by the command tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from ss_convert.command import main as ss_convert
from ss_device.adapter import Adapter, save_adapter
from ss_device.base_model import BaseFolder
from ss_device.config import SpeculativeConfig
from ss_device.files import sha256
from tests.tiny_models import make_tiny_base, random_adapter

CONFIG = SpeculativeConfig(
    num_streams=3,
    num_msa_layers=2,
    stream_mlp="base",
    stream_lora_rank=2,
    stream_lora_alpha=4.0,
    bigram_rank=4,
)
PROMPTS = ("SELECT a", "the prompt, again and again")
SIZES = ("--nodes", "12", "--context", "96", "--chunk", "16")


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """`base/tiny-base`, `base/other-base` and `adapters/tiny`, two golden prompts with it."""
    folder = tmp_path_factory.mktemp("models")
    base = make_tiny_base(folder / "base" / "tiny-base", dtype="float16")
    make_tiny_base(folder / "base" / "other-base", seed=7, dtype="float16")
    adapter = folder / "adapters" / "tiny"
    save_adapter(random_adapter(base, CONFIG), base.architecture, adapter)
    rows = "".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS)
    (adapter / "golden_prompts.jsonl").write_text(rows)
    return folder


@pytest.fixture(scope="session")
def bundle(models, tmp_path_factory) -> Path:
    """Both targets of the tiny adapter. Read only: copy it before changing it."""
    output = tmp_path_factory.mktemp("build") / "tiny"
    assert ss_convert(["--adapter", "tiny", "--models", str(models), "--output", str(output), *SIZES]) == 0
    return output


@pytest.fixture
def copied(bundle, tmp_path) -> Path:
    """A copy of the bundle to damage."""
    return Path(shutil.copytree(bundle, tmp_path / "copied"))


@pytest.fixture
def own_models(models, tmp_path) -> Path:
    """A copy of the models to damage."""
    return Path(shutil.copytree(models, tmp_path / "own_models"))


@pytest.fixture
def refuses(capfd) -> Callable:
    """Call a command that must refuse its input: exit code 2 and exactly one line that says why."""

    def check(main: Callable, *arguments: object, says: tuple[str, ...]) -> None:
        capfd.readouterr()
        assert main([str(a) for a in arguments]) == 2
        output = capfd.readouterr()
        assert output.out == ""
        assert output.err.startswith("error: ") and output.err.count("\n") == 1, output.err
        for part in says:
            assert part in output.err

    return check


def save_with_lora(adapter: Adapter, base: BaseFolder, folder: Path) -> None:
    """An adapter folder whose LoRA stands under PEFT's names, as in the shared mode."""
    save_adapter(adapter, base.architecture, folder)
    tensors = {}
    for projection, (a, b) in adapter.lora.items():
        _, layer, block, name = projection.split(".")
        module = f"layers.{layer}.{'self_attn' if block == 'attn' else 'mlp'}.{name}_proj"
        tensors[f"base_model.model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.model.{module}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")


def rewrite_manifest(folder: Path) -> None:
    """Make the manifest agree with the files as they are now: the damage is for the readers to find."""
    file = folder / "manifest.json"
    raw = json.loads(file.read_text())
    raw["files"] = {
        str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": sha256(p)}
        for p in folder.rglob("*")
        if p.is_file() and p != file
    }
    file.write_text(json.dumps(raw))
