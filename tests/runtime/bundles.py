"""Small bundles for the tests of the runtime: MLX alone without the converter, functions with it."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ss_convert.command import main as ss_convert
from ss_device.adapter import save_adapter
from ss_device.base_model import BaseFolder
from ss_device.bundle import Bundle, BundledAdapter, Manifest, open_bundle, write_manifest
from ss_device.config import SpeculativeConfig
from tests.commands.conftest import SIZES, save_with_lora
from tests.runtime.mlx_cases import adapter_arrays
from tests.tiny_models import random_adapter

# Back ends that run functions here; the asset's is Apple's own runtime.
HAS_COREAI = find_spec("coreai") is not None
FUNCTION_BACKENDS = [
    "executor",
    pytest.param("coreai", marks=pytest.mark.skipif(not HAS_COREAI, reason="coreai-core is not installed")),
]
FUNCTION_TARGETS = "mlx,coreml,coreai" if HAS_COREAI else "mlx,coreml"


def make_bundle(
    folder: Path, base: BaseFolder, configs: dict[str, SpeculativeConfig], num_nodes: int = 6
) -> Bundle:
    """MLX files of several random adapters over one base, tokenizer and manifest."""
    (folder / "mlx/adapters").mkdir(parents=True)
    save_file(base.weights(), folder / "mlx/base.safetensors")
    shutil.copy(base.path / "tokenizer.json", folder)
    adapters = {}
    for seed, (name, config) in enumerate(configs.items()):
        file = f"mlx/adapters/{name}.safetensors"
        arrays = adapter_arrays(random_adapter(base, config, seed=seed))
        save_file({n: np.ascontiguousarray(a) for n, a in arrays.items()}, folder / file)
        adapters[name] = BundledAdapter(name, config, "{prompt}", (), 20, num_nodes, file)
    write_manifest(folder, Manifest(base.architecture, base.identity, adapters))
    return open_bundle(folder)


def convert_bundle(
    folder: Path, base: BaseFolder, configs: dict[str, SpeculativeConfig], *options: str
) -> Bundle:
    """A bundle of several random adapters over one base, made by `ss-convert`; no golden traces."""
    named = []
    for seed, (name, config) in enumerate(configs.items()):
        adapter, place = random_adapter(base, config, seed, name), folder.parent / "adapters" / name
        if config.lora_rank:
            save_with_lora(adapter, base, place)
        else:
            save_adapter(adapter, base.architecture, place)
        named += ["--adapter", str(place)]
    common = ("--base", str(base.path), "--output", str(folder), *SIZES, "--no-golden")
    assert ss_convert([*named, *common, *options]) == 0
    return open_bundle(folder)
