"""Back ends by name: the step models that can run a bundle on this machine.

| name | what runs | dtypes |
|---|---|---|
| mlx | MLX: Metal GPU on a Mac, CPU on Linux | float16, float32, bfloat16 |
| executor | the bundle's Core ML package, op by op in numpy, anywhere | float16, float32 |
| reference | PyTorch on the bundle's own weights | float32, bfloat16, float16 |
| coreml | Core ML itself, on a Mac | float16 |
| mlxfn | the bundle's exported MLX functions | the one that they were exported in |
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from importlib.util import find_spec
from pathlib import Path

from ss_device.bundle import MLX_BASE, Bundle, BundledAdapter
from ss_device.errors import UserError, library_errors
from ss_device.step_model import StepModel
from ss_runtime.coreml.step_model import open_coreml_model
from ss_runtime.plain_base import has_streams

DTYPES = {
    "mlx": ("float16", "float32", "bfloat16"),
    "executor": ("float16", "float32"),
    "reference": ("float32", "float16", "bfloat16"),
    "coreml": ("float16",),
    "mlxfn": ("float16", "float32", "bfloat16"),
}
BACKENDS = tuple(DTYPES)
QUANTIZATIONS = ("4", "8", "mxfp4")
KV_BITS = (4, 8)
CONFIG_FILE = "config.json"
OPENBLAS = "openblas-pthread/libblas.so.3"
# Unless the environment says otherwise. Two decode faster than one on two free cores (docs/benchmark.md).
# They wait for each other at every product of matrices: where another program holds a core, one is faster.
OPENBLAS_THREADS = 2
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")  # read in this order


def check_backend(name: str, dtype: str | None = None) -> None:
    """Raise UserError for a back end or dtype that does not exist."""
    if name not in DTYPES:
        raise UserError(f"unknown back end '{name}' (known: {', '.join(BACKENDS)})")
    if dtype is not None and dtype not in DTYPES[name]:
        raise UserError(f"back end '{name}' does not compute in {dtype} (known: {', '.join(DTYPES[name])})")


def default_dtype(name: str) -> str:
    """Half precision where the hardware has it; MLX on a CPU is faster and exact in float32."""
    if name == "mlx" and sys.platform != "darwin":
        return "float32"
    return DTYPES[name][0]


def default_backend(bundle: Bundle, adapter: BundledAdapter) -> str:
    """MLX where it can run the bundle, else the first back end that can."""
    for name in ("mlx", "coreml", "reference", "executor"):
        if why_not(name, bundle, adapter) is None:
            return name
    raise UserError(f"no back end can run {bundle.path} here ({why_not('mlx', bundle, adapter)})")


def why_not(name: str, bundle: Bundle, adapter: BundledAdapter) -> str | None:
    """Why a back end cannot run this bundle on this machine; None when it can."""
    if name == "coreml" and sys.platform != "darwin":
        return "Core ML runs on a Mac only; 'executor' runs the same package here"
    if name in ("coreml", "executor") and adapter.coreml is None:
        return "the bundle has no Core ML package (ss-convert --target coreml)"
    if name == "mlxfn" and adapter.mlxfn is None:
        return "the bundle has no exported functions (ss-convert --target mlxfn)"
    if name in ("mlx", "reference") and not (bundle.path / MLX_BASE).is_file():
        return "the bundle has no MLX weights (ss-convert --target mlx)"
    needed = {
        "mlx": ("mlx",),
        "reference": ("torch", "transformers"),
        "executor": ("coremltools", "google.protobuf", "ss_convert"),
        "coreml": ("coremltools",),
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
    name: str,
    bundle: Bundle,
    adapter: BundledAdapter,
    dtype: str | None = None,
    stream_rows: str | None = None,
    quantize: str | None = None,
    compute_units: str | None = None,
    num_kept: int | None = None,
    kv_bits: int | None = None,
    device: str | None = None,
) -> StepModel:
    """The adapter's step model on a back end.

    stream_rows: which nodes carry streams on MLX (None: what is fastest for whole trees here); quantize:
    what MLX packs the base's matrices to (`QUANTIZATIONS`); compute_units: engines that Core ML may use;
    num_kept: nodes that MLX keeps after pruning (None: as the bundle's package); kv_bits: what it keeps
    keys and values in (`KV_BITS`); device: where the reference computes (`cpu`, `cuda`, `mps`). Raises
    UserError when the back end is unknown, is not available here, or a file is damaged.
    """
    check_backend(name, dtype)
    _check_options(name, bundle, adapter, compute_units, quantize, kv_bits, device)
    if name == "mlxfn":
        model = _open_functions(bundle, adapter, dtype)
    elif name == "mlx":
        rows = stream_rows or fastest_stream_rows(adapter, adapter.num_nodes)
        settings = {} if num_kept is None else {"num_kept": num_kept}
        dtype = dtype or default_dtype(name)
        model = _open_mlx(bundle, adapter, dtype, rows, quantize=quantize, kv_bits=kv_bits, **settings)
    elif name == "reference":
        model = open_reference(bundle, adapter, dtype or default_dtype(name), device)
    elif name == "executor":
        model = _open_executor(bundle, adapter, dtype or default_dtype(name))
    else:
        model = open_coreml_model(bundle, adapter, compute_units or "all")
    bundle.check_unchanged()
    return model


def _check_options(
    name: str,
    bundle: Bundle,
    adapter: BundledAdapter,
    compute_units: str | None,
    quantize: str | None,
    kv_bits: int | None,
    device: str | None,
) -> None:
    """UserError for an option that the back end does not have, or that is not available here."""
    if compute_units is not None and name != "coreml":
        raise UserError(f"--compute-units is for back end 'coreml', not for '{name}'")
    if device is not None and name != "reference":
        raise UserError(f"--device is for back end 'reference', not for '{name}'")
    if (reason := why_not(name, bundle, adapter)) is not None:
        raise UserError(f"back end '{name}': {reason}")
    if quantize is not None and name != "mlx":
        raise UserError(f"back end '{name}' computes with the bundle's weights: leave --quantize out")
    if kv_bits is not None and name != "mlx":
        raise UserError(f"back end '{name}' keeps keys and values as they are: leave --kv-bits out")


def fastest_stream_rows(adapter: BundledAdapter, num_nodes: int) -> str:
    """Where MLX should compute streams to generate fastest (`MLXStepModel`).

    On a CPU every row costs, so a second pass over the accepted node's streams alone pays; a GPU takes
    all rows in one pass. Plain decoding needs no streams. A main stream that attends to its own streams
    needs them in every row.
    """
    if adapter.config.main_attends_streams:
        return "kept"
    if num_nodes == 1 or not has_streams(adapter):
        return "none"
    return "kept" if sys.platform == "darwin" else "accepted"


def _open_mlx(
    bundle: Bundle, adapter: BundledAdapter, dtype: str, stream_rows: str, **settings
) -> StepModel:
    load_openblas()
    from ss_runtime.mlx.loading import load_model

    settings = {**_pruning(adapter), **settings}
    return load_model(bundle, adapter, dtype, stream_rows=stream_rows, **settings)


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
    from ss_runtime.coreml.step_model import open_executor_model

    with library_errors(f"{bundle.path}: the executor cannot read the package"):
        return open_executor_model(bundle, adapter, dtype=dtype)


def _pruning(adapter: BundledAdapter) -> dict:
    """The package's pruning, so that every back end of a bundle prunes alike."""
    sizes = adapter.coreml
    if sizes is None or sizes.num_kept == sizes.num_nodes:
        return {}
    return {"num_kept": sizes.num_kept, "prune_over": sizes.prune_over}


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
    bundle: Bundle,
    adapter: BundledAdapter,
    dtype: str = "float32",
    device: str | None = None,
    context: int | None = None,
) -> StepModel:
    """PyTorch on the bundle's own weights.

    device: `cpu`, `cuda` or `mps` (None: what is there); context: tokens it may hold (None: as the base).
    """
    from ss_device.reference.device import chosen_device
    from ss_device.reference.step_model import ReferenceStepModel
    from ss_device.reference.stream_model import attach_adapter

    architecture = bundle.manifest.architecture
    base = hugging_face_model(bundle, dtype).to(chosen_device(device))
    held = adapter_in_memory(bundle, adapter)
    held.check_shapes(architecture)
    model = attach_adapter(base, architecture, held)
    return ReferenceStepModel(model, adapter.num_nodes, context=context, **_pruning(adapter))


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
    from ss_device.old_names import TENSORS, renamed

    tensors = renamed(read_tensors(bundle.path / adapter.tensor_file), TENSORS)
    tensors |= bundle.bigram_bias_tensors(adapter)
    factors: dict[str, dict] = {}
    for name in [n for n in tensors if n.startswith("lora.")]:
        projection, _, factor = name.removeprefix("lora.").rpartition(".")
        factors.setdefault(projection, {})[factor] = tensors.pop(name)
    return Adapter(
        app=adapter.app,
        config=adapter.config,
        base=bundle.manifest.base,
        tensors=tensors,
        prompt_template=adapter.prompt_template,
        lora={name: (pair["a"], pair["b"]) for name, pair in factors.items()},
    )
