"""From an opened bundle to an MLX step model."""

from __future__ import annotations

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


def load_model(
    bundle: Bundle,
    adapter: BundledAdapter,
    dtype: str = "float16",
    *,
    num_nodes: int | None = None,
    num_kept: int | None = None,
    context: int | None = None,
    prune_over: str = "draft",
    stream_rows: str | None = None,
    quantize: str | None = None,
    kv_bits: int | None = None,
) -> MLXStepModel:
    """The adapter's step model from the bundle's MLX files (ARCHITECTURE.md).

    num_nodes: nodes per step, by default the adapter's; num_kept: nodes after pruning, by default all;
    context in tokens, by default `Architecture.default_context`; stream_rows by default as
    `default_stream_rows` says; quantize: of `SCHEMES`, what the base's matrices are packed to (None: not at
    all); the rest, kv_bits too, as in `MLXStepModel`. Raises UserError for a bundle without MLX files, a
    damaged file or settings that do not fit.
    """
    architecture = bundle.manifest.architecture
    stream_rows = default_stream_rows(adapter.config) if stream_rows is None else stream_rows
    return MLXStepModel(
        architecture,
        adapter.config,
        base_arrays(bundle, dtype, quantize),
        load_arrays(bundle.path / adapter.tensor_file) if adapter.tensor_file else {},
        num_nodes=adapter.num_nodes if num_nodes is None else num_nodes,
        num_kept=num_kept,
        context=architecture.default_context if context is None else context,
        prune_over=prune_over,
        dtype=dtype,
        stream_rows=stream_rows,
        kv_bits=kv_bits,
    )


def base_arrays(bundle: Bundle, dtype: str, quantize: str | None) -> dict[str, mx.array]:
    """The base's canonical arrays in `dtype`, quantized where asked."""
    kind = getattr(mx, dtype)
    arrays = {name: as_weight(a, kind) for name, a in load_arrays(bundle.path / MLX_BASE).items()}
    return quantize_base(arrays, bundle.manifest.architecture, quantize)


def load_folders(
    base: Path,
    adapter: Adapter,
    dtype: str = "float16",
    *,
    num_nodes: int,
    context: int | None = None,
    **settings,
) -> MLXStepModel:
    """The step model of a base folder and an adapter, without a bundle.

    base: Hugging Face's layout in 16 or 32 bits, or MLX's (mlx-community) in affine quantization; settings
    as in `MLXStepModel`. Only shapes are checked, not the base's digest: a quantized copy of the base that
    the adapter was trained on has another one. What it generates is that copy's own text.
    """
    architecture = read_architecture(read_json(base / "config.json"))
    adapter.check_shapes(architecture)
    factors = {
        f"lora.{name}.{factor}": array
        for name, pair in adapter.lora.items()
        for factor, array in zip("ab", pair, strict=True)
    }
    return MLXStepModel(
        architecture,
        adapter.config,
        checkpoint_arrays(base, architecture),
        adapter.tensors | factors,
        num_nodes=num_nodes,
        context=architecture.default_context if context is None else context,
        dtype=dtype,
        **{"stream_rows": default_stream_rows(adapter.config), **settings},
    )


def default_stream_rows(config: SpeculativeConfig) -> str:
    """`kept` (one pass) on a GPU, `accepted` (fewer rows) on a CPU, whose cost grows with the rows.

    A main stream that attends to its streams needs them on every node.
    """
    if config.main_attends_streams or mx.default_device() == mx.gpu:
        return "kept"
    return "accepted"


def load_arrays(path: Path) -> dict[str, mx.array]:
    """Arrays of a safetensors file. A missing or damaged file is a UserError that names it."""
    if not path.is_file():
        raise UserError(f"{path}: no such file (the bundle was made without MLX weights)")
    try:
        return dict(mx.load(str(path)))
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({one_line(error)})") from error
