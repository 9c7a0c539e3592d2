"""Small bundles for the MLX tests, written without the converter."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ss_device.base_model import BaseFolder
from ss_device.bundle import Bundle, BundledAdapter, Manifest, open_bundle, write_manifest
from ss_device.config import SpeculativeConfig
from tests.runtime.mlx_cases import adapter_arrays
from tests.tiny_models import random_adapter


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
