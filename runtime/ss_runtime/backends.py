"""Back ends by name: the step models that can run a bundle on this machine.

| name | what runs | dtypes |
|---|---|---|
| mlx | MLX: Metal GPU on a Mac, CPU on Linux | float16, float32, bfloat16 |
| executor | the bundle's Core ML package, op by op in numpy, anywhere | float16, float32 |
| reference | PyTorch on the bundle's own weights | float32, bfloat16, float16 |
| coreml | Core ML itself, on a Mac | float16 |
| coreai | the bundle's Core AI asset, by Apple's runtime: the wheel's, or a Mac's own | float16, float32 |
| mlxfn | the bundle's exported MLX functions | the one that they were exported in |
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from ss_device.bundle import MLX_BASE, Bundle, BundledAdapter
from ss_device.errors import UserError, library_errors
from ss_device.step_model import StepModel
from ss_runtime.coreai.engines import open_coreai_model
from ss_runtime.coreml.engines import open_coreml_model
from ss_runtime.settings import RuntimeSettings, default_dtype

CONFIG_FILE = "config.json"
OPENBLAS = "openblas-pthread/libblas.so.3"
# Unless the environment says otherwise. Two decode faster than one on two free cores (docs/benchmark.md).
# They wait for each other at every product of matrices: where another program holds a core, one is faster.
OPENBLAS_THREADS = 2
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")  # read in this order


def default_backend(bundle: Bundle, adapter: BundledAdapter) -> str:
    """MLX where it can run the bundle, else the first back end that can."""
    for name in ("mlx", "coreml", "coreai", "reference", "executor"):
        if why_not(name, bundle, adapter) is None:
            return name
    raise UserError(f"no back end can run {bundle.path} here ({why_not('mlx', bundle, adapter)})")


def why_not(name: str, bundle: Bundle, adapter: BundledAdapter) -> str | None:
    """Why a back end cannot run this bundle on this machine; None when it can."""
    if name == "coreml" and sys.platform != "darwin":
        return "Core ML runs on a Mac only; 'executor' runs the same package here"
    if name in ("coreml", "executor") and adapter.coreml is None:
        return "the bundle has no Core ML package (ss-convert --target coreml)"
    if name == "coreai" and adapter.coreai is None:
        return "the bundle has no Core AI asset (ss-convert --target coreai)"
    if name == "mlxfn" and adapter.mlxfn is None:
        return "the bundle has no exported functions (ss-convert --target mlxfn)"
    if name in ("mlx", "reference") and not (bundle.path / MLX_BASE).is_file():
        return "the bundle has no MLX weights (ss-convert --target mlx)"
    needed = {
        "mlx": ("mlx",),
        "reference": ("torch", "transformers"),
        "executor": ("coremltools", "google.protobuf", "ss_convert"),
        "coreml": ("coremltools",),
        "coreai": ("coreai",),
        "mlxfn": ("mlx",),
    }
    for module in needed[name]:
        if not _installed(module):
            return f"{module} is not installed"
    return None


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a missing parent package
        return False


def open_backend(
    bundle: Bundle, adapter: BundledAdapter, settings: RuntimeSettings | None = None
) -> StepModel:
    """The adapter's step model on the settings' back end, by default on the one that suits this machine.

    Raises UserError when the back end is unknown, is not to be had here, has no use for a setting, or a
    file is damaged.
    """
    settings = settings or RuntimeSettings()
    settings = replace(settings, backend=settings.backend or default_backend(bundle, adapter))
    name, dtype = settings.backend, settings.dtype or default_dtype(settings.backend)
    settings.check()
    if (reason := why_not(name, bundle, adapter)) is not None:
        raise UserError(f"back end '{name}': {reason}")
    if name == "mlx":
        model = _open_mlx(bundle, adapter, settings)
    elif name == "mlxfn":
        model = _open_functions(bundle, adapter, settings.dtype)
    elif name == "reference":
        model = open_reference(bundle, adapter, settings)
    elif name == "executor":
        model = _open_executor(bundle, adapter, dtype)
    elif name == "coreai":
        model = open_coreai_model(bundle, adapter, dtype, settings.compute_units or "all")
    else:
        model = open_coreml_model(bundle, adapter, settings.compute_units or "all")
    bundle.check_unchanged()
    return model


def _open_mlx(bundle: Bundle, adapter: BundledAdapter, settings: RuntimeSettings) -> StepModel:
    load_openblas()
    from ss_runtime.mlx.loading import load_model

    return load_model(bundle, adapter, settings)


def _open_functions(bundle: Bundle, adapter: BundledAdapter, dtype: str | None) -> StepModel:
    if dtype not in (None, adapter.mlxfn.dtype):
        raise UserError(
            f"the functions of '{adapter.app}' were exported in {adapter.mlxfn.dtype}, not in {dtype}"
        )
    load_openblas()
    from ss_runtime.mlx.function_model import open_functions
    from ss_runtime.mlx.function_probe import check_functions

    check_functions(bundle, adapter)
    return open_functions(bundle, adapter)


def _open_executor(bundle: Bundle, adapter: BundledAdapter, dtype: str) -> StepModel:
    from ss_runtime.coreml.engines import open_executor_model

    with library_errors(f"{bundle.path}: the executor cannot read the package"):
        return open_executor_model(bundle, adapter, dtype=dtype)


def load_openblas() -> Path | None:
    """Load Debian's OpenBLAS, where installed, in place of the slow BLAS inside MLX's Linux wheel.

    Loaded with global visibility before MLX is, its symbols win. It gets OPENBLAS_THREADS threads where
    none of THREAD_VARIABLES is set. Returns the library's path or None.
    """
    if sys.platform != "linux":
        return None
    path = Path(f"/usr/lib/{platform.machine()}-linux-gnu") / OPENBLAS
    if not path.is_file():
        return None
    if not any(os.environ.get(name) for name in THREAD_VARIABLES):
        os.environ[THREAD_VARIABLES[0]] = str(OPENBLAS_THREADS)
    try:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None
    return path


def blas_threads() -> int | None:
    """Threads of the loaded OpenBLAS; None where MLX computes with something else."""
    path = load_openblas()
    return None if path is None else int(ctypes.CDLL(str(path)).openblas_get_num_threads())


def open_reference(
    bundle: Bundle, adapter: BundledAdapter, settings: RuntimeSettings | None = None
) -> StepModel:
    """PyTorch on the bundle's own weights, with the settings' dtype (None: float32), device and sizes."""
    from ss_device.reference.device import chosen_device
    from ss_device.reference.step_model import ReferenceStepModel
    from ss_device.reference.stream_model import attach_adapter

    settings = settings or RuntimeSettings()
    sizes = settings.for_adapter(bundle, adapter)
    dtype = settings.dtype or default_dtype("reference")
    base = hugging_face_model(bundle, dtype).to(chosen_device(settings.device))
    held = adapter_in_memory(bundle, adapter)
    held.check_shapes(bundle.manifest.architecture)
    model = attach_adapter(base, bundle.manifest.architecture, held)
    # Without a context of the user's own, that of the base.
    return ReferenceStepModel(model, sizes.num_nodes, sizes.num_kept, settings.context, sizes.prune_over)


def hugging_face_model(bundle: Bundle, dtype: str = "float32"):
    """The bundle's base weights in a Hugging Face model, every parameter frozen."""
    from ss_device.checkpoint_weights import CheckpointWeights, stored_tensors
    from ss_device.reference.hugging_face import model_of

    file, architecture = bundle.path / MLX_BASE, bundle.manifest.architecture
    weights = CheckpointWeights(stored_tensors(file), architecture, str(file))
    return model_of(_hugging_face_config(bundle), weights, architecture, dtype)


def _hugging_face_config(bundle: Bundle):
    """The base's own config.json, which the bundle carries; in its absence that of a plain Llama."""
    from transformers import LlamaConfig

    from ss_device.reference.hugging_face import plain_config

    if (bundle.path / CONFIG_FILE).is_file():
        return plain_config(bundle.path)
    a = bundle.manifest.architecture
    return LlamaConfig(
        vocab_size=a.vocab_size,
        hidden_size=a.hidden_size,
        intermediate_size=a.intermediate_size,
        num_hidden_layers=a.num_layers,
        num_attention_heads=a.num_heads,
        num_key_value_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        rms_norm_eps=a.norm_eps,
        rope_theta=a.rope_theta,
        max_position_embeddings=a.max_positions,
        tie_word_embeddings=a.tied_head,
        bos_token_id=a.bos_id,
        eos_token_id=list(a.eos_ids) or None,
    )


def adapter_in_memory(bundle: Bundle, adapter: BundledAdapter):
    """The bundle's adapter as `ss_device.adapter.Adapter`, LoRA factors split off again."""
    from ss_device.adapter import Adapter
    from ss_device.files import read_tensors
    from ss_device.lora_names import split_lora
    from ss_device.old_names import TENSORS, renamed

    tensors = renamed(read_tensors(bundle.path / adapter.tensor_file), TENSORS)
    tensors |= bundle.bigram_bias_tensors(adapter)
    tensors, lora = split_lora(tensors)
    return Adapter(
        app=adapter.app,
        config=adapter.config,
        base=bundle.manifest.base,
        tensors=tensors,
        prompt_template=adapter.prompt_template,
        lora=lora,
    )
