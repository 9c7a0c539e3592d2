"""The last look at a converted bundle before it gets its name: read back what was written."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ss_convert.mlx.weights import own_tensors, shared_bigram_bias
from ss_device.adapter import Adapter
from ss_device.base_model import BaseFolder
from ss_device.bundle import MLX_BASE, Bundle, BundledAdapter
from ss_device.checkpoint_weights import StoredTensor, blocks, stored_tensors
from ss_device.errors import UserError
from ss_device.step_model import StepModel
from ss_device.trace import load_traces
from ss_device.tree import root_only

CHECKED_STEPS = 2
# Bytes of an asset: the wheel's runtime multiplies about 5 billion numbers a second, in float32.
LARGEST_RUN = 500_000_000


def check_base(bundle: Bundle, weights: Mapping[str, np.ndarray]) -> None:
    """Raise UserError unless the base's canonical arrays read back equal from the MLX file."""
    if getattr(weights, "packed", None):
        check_stored(bundle, MLX_BASE, weights.stored)
        return
    check_tensors(bundle, MLX_BASE, weights)


def check_adapter(
    bundle: Bundle, adapter: Adapter, base: BaseFolder, targets: tuple[str, ...]
) -> list[str]:
    """Raise UserError unless tensors read back equal and package and asset do what the reference did.

    The package runs on the reference executor in float32, the asset on Apple's local runtime: the first
    steps of the first golden prompt, or a smoke run where the bundle has no traces. → what was left out.
    """
    entry = bundle.adapter(adapter.app)
    check_tensors(bundle, entry.tensor_file, own_tensors(adapter))
    if entry.bigram_bias_file:
        check_tensors(bundle, entry.bigram_bias_file, shared_bigram_bias(adapter))
    if "mlxfn" in targets:
        check_functions(bundle, entry)
    if "coreml" in targets:
        check_package(bundle, entry, base)
    if "coreai" in targets and is_too_large_to_run(bundle, entry):
        return [
            f"the Core AI asset of more than {LARGEST_RUN / 1e6:.0f} MB was not run after it was written; "
            "ss-validate --backend coreai does"
        ]
    if "coreai" in targets:
        check_asset(bundle, entry, base)
    return []


def check_functions(bundle: Bundle, entry: BundledAdapter) -> None:
    """Import the exported functions and compare their first calls with the runtime's, node by node."""
    from ss_runtime.mlx.function_comparison import first_difference

    if difference := first_difference(bundle, entry, CHECKED_STEPS):
        raise UserError(f"check failed: exported functions against the MLX runtime: {difference}")


def is_exact_in_half(weights: Mapping[str, np.ndarray]) -> bool:
    """Whether rounding to float16 leaves every weight as it is."""
    return all(
        w.dtype == np.float16 or np.array_equal(w.astype(np.float16).astype(w.dtype), w)
        for weight in weights.values()
        for w in blocks(weight)
    )


def check_tensors(bundle: Bundle, name: str, source: Mapping[str, np.ndarray]) -> None:
    """A written file holds `source` rounded to float16."""
    written = stored_tensors(bundle.path / name)
    for tensor, values in source.items():
        if tensor not in written or not _is_half_of(written[tensor].read(), np.asarray(values)):
            raise UserError(f"check failed: tensor '{tensor}' in {name} is not what was converted")


def _is_half_of(half: np.ndarray, values: np.ndarray) -> bool:
    pairs = zip(blocks(half), blocks(values), strict=True)
    return half.shape == values.shape and all(np.array_equal(h, v.astype(np.float16)) for h, v in pairs)


def check_stored(bundle: Bundle, name: str, source: Mapping[str, StoredTensor]) -> None:
    """A written file holds the very bytes of `source`."""
    written = stored_tensors(bundle.path / name)
    for tensor, values in source.items():
        found = written.get(tensor)
        if found is None or found.dtype != values.dtype or not np.array_equal(found.raw(), values.raw()):
            raise UserError(f"check failed: tensor '{tensor}' in {name} is not what was converted")


def check_package(bundle: Bundle, entry: BundledAdapter, base: BaseFolder) -> None:
    """Run the fresh package on the executor and compare with the golden trace."""
    from ss_executor import ExecutorError
    from ss_runtime.coreml.engines import open_executor_model

    try:
        model = open_executor_model(bundle, entry, "float32", keep_weights=False)
    except ExecutorError as error:
        raise UserError(f"check failed: the Core ML package cannot be read back: {error}") from error
    check_steps(model, "executor", bundle, entry, base)


def check_asset(bundle: Bundle, entry: BundledAdapter, base: BaseFolder) -> None:
    """Run the fresh asset on Apple's runtime and compare with the golden trace.

    In float32, but on a Mac's own runtime, which computes as the asset says.
    """
    from ss_runtime.coreai.asset import is_system_runtime
    from ss_runtime.coreai.engines import asset_engines
    from ss_runtime.function_step_model import open_step_model

    dtype = "float16" if is_system_runtime() else "float32"
    # No digests are written yet that its files could be compared with.
    engines = asset_engines(bundle.path, entry.coreai, entry.config, base.architecture, dtype)
    model = open_step_model(bundle, entry, entry.coreai, engines)
    check_steps(model, "coreai", bundle, entry, base, dtype)


def is_too_large_to_run(bundle: Bundle, entry: BundledAdapter) -> bool:
    """Whether running the asset would take much longer, and much more memory, than the conversion."""
    from ss_runtime.coreai.asset import asset_bytes

    return sum(asset_bytes(bundle.path / name) for name in entry.coreai.packages) > LARGEST_RUN


def check_steps(
    model: StepModel,
    backend: str,
    bundle: Bundle,
    entry: BundledAdapter,
    base: BaseFolder,
    dtype: str = "float32",
) -> None:
    """The first steps of the first golden trace, or of a smoke run, on a back end."""
    from ss_runtime.validation import ReplayOutcome, golden_of, has_exact_weights, replay_traces

    what = {"executor": "Core ML package", "coreai": "Core AI asset"}[backend]
    golden = golden_of(entry, backend)
    traces = load_traces(bundle.path / golden, base.architecture.vocab_size) if golden else []
    if not (traces := [trace for trace in traces if trace.steps]):
        token = base.architecture.bos_id or 0
        proposal = model.prefill([token])
        verified = model.step(root_only(proposal.root))
        if not np.all(np.isfinite(verified.stream_logits)):
            raise UserError(f"check failed: the {what} gives logits of '{entry.app}' that are not finite")
        return
    found = ReplayOutcome(backend, dtype, has_exact_weights(bundle, entry, backend))
    replay_traces(model, traces[:1], found, CHECKED_STEPS)
    if found.failures:
        raise UserError(f"check failed: {what} against the reference: {found.failures[0]}")
