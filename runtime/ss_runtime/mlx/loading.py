"""From an opened bundle to an MLX step model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from ss_device.adapter import Adapter
from ss_device.bundle import MLX_BASE, Bundle, BundledAdapter
from ss_device.config import SpeculativeConfig
from ss_device.errors import UserError, one_line
from ss_device.families import read_architecture
from ss_device.strict_json import read_json
from ss_runtime.mlx.decoder import as_weight
from ss_runtime.mlx.quantized_weights import checkpoint_arrays, quantize_base
from ss_runtime.mlx.step_model import MLXStepModel
from ss_runtime.plain_base import has_streams
from ss_runtime.settings import RuntimeSettings, default_dtype


def load_model(
    bundle: Bundle, adapter: BundledAdapter, settings: RuntimeSettings | None = None
) -> MLXStepModel:
    """The adapter's step model from the bundle's MLX files.

    What the settings leave open is the bundle's: sizes and pruning as `RuntimeSettings.for_adapter` says,
    dtype as `default_dtype`, streams where they are fastest (`fastest_stream_rows`). Raises UserError for a
    bundle without MLX files, a damaged file or settings that do not fit.
    """
    settings = mlx_settings(bundle, adapter, settings or RuntimeSettings())
    base = base_arrays(bundle, settings.dtype, settings.quantize)
    return adapter_model(bundle, adapter, base, settings)


def mlx_settings(bundle: Bundle, adapter: BundledAdapter, settings: RuntimeSettings) -> RuntimeSettings:
    """Settings of the adapter's MLX model in which nothing is left open."""
    rows = settings.stream_rows or fastest_stream_rows(adapter.config, has_streams(adapter))
    dtype = settings.dtype or default_dtype("mlx")
    return replace(settings.for_adapter(bundle, adapter), stream_rows=rows, dtype=dtype)


def adapter_model(
    bundle: Bundle, adapter: BundledAdapter, base: dict[str, mx.array], settings: RuntimeSettings
) -> MLXStepModel:
    """The adapter's step model over arrays of the base that are there. settings: of `mlx_settings`."""
    own = load_arrays(bundle.path / adapter.tensor_file) if has_streams(adapter) else {}
    return MLXStepModel(bundle.manifest.architecture, adapter.config, base, own, settings)


def base_arrays(bundle: Bundle, dtype: str, quantize: str | None) -> dict[str, mx.array]:
    """The base's canonical arrays in `dtype`, quantized where asked."""
    kind = getattr(mx, dtype)
    arrays = {name: as_weight(a, kind) for name, a in load_arrays(bundle.path / MLX_BASE).items()}
    return quantize_base(arrays, bundle.manifest.architecture, quantize)


class LoadedFolder:
    """The weights of a base folder, without a bundle, for models with one adapter or another.

    path: Hugging Face's layout in 16 or 32 bits, or MLX's (mlx-community) in affine quantization. Raises
    UserError for a damaged folder or a quantization that does not fit.
    """

    def __init__(self, path: Path, dtype: str | None = None, quantize: str | None = None) -> None:
        self.path, self.dtype, self.quantize = path, dtype or default_dtype("mlx"), quantize
        self.architecture = read_architecture(read_json(path / "config.json"))
        arrays = checkpoint_arrays(path, self.architecture)
        if quantize is not None:
            arrays = {name: as_weight(a, getattr(mx, self.dtype)) for name, a in arrays.items()}
        self._arrays = quantize_base(arrays, self.architecture, quantize)

    def model(self, adapter: Adapter, settings: RuntimeSettings) -> MLXStepModel:
        """The step model with an adapter. settings: num_nodes must be said.

        Only shapes are checked, not the base's digest: a quantized copy of the base that the adapter was
        trained on has another one. What it generates is that copy's own text.
        """
        adapter.check_shapes(self.architecture)
        rows = settings.stream_rows or fastest_stream_rows(adapter.config)
        settings = replace(settings, stream_rows=rows, dtype=settings.dtype or self.dtype)
        tensors = adapter.tensors | adapter.lora_tensors()
        return MLXStepModel(self.architecture, adapter.config, self._arrays, tensors, settings)


def fastest_stream_rows(config: SpeculativeConfig, drafts: bool = True) -> str:
    """Where streams are computed to generate fastest (`MLXStepModel`). drafts: whether any are wanted.

    `accepted` (fewer rows) on a CPU, whose cost grows with the rows, `kept` (one pass) on a GPU. A main
    stream that attends to its streams needs them on every node, whatever is drafted.
    """
    if config.main_attends_streams:
        return "kept"
    if not drafts:
        return "none"
    return "kept" if mx.default_device() == mx.gpu else "accepted"


def load_arrays(path: Path) -> dict[str, mx.array]:
    """Arrays of a safetensors file. A missing or damaged file is a UserError that names it."""
    if not path.is_file():
        raise UserError(f"{path}: no such file (the bundle was made without MLX weights)")
    try:
        return dict(mx.load(str(path)))
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({one_line(error)})") from error
