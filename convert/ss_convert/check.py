"""The last look at a converted bundle before it gets its name: read back what was written."""

from __future__ import annotations

import numpy as np

from ss_device.adapter import Adapter
from ss_device.base_model import BaseFolder
from ss_device.bundle import Bundle, BundledAdapter
from ss_device.errors import UserError
from ss_device.files import read_tensors
from ss_device.trace import load_traces
from ss_device.tree import root_only

CHECKED_STEPS = 2


def check_bundle(
    bundle: Bundle, adapter: Adapter, base: BaseFolder, weights: dict, targets: tuple[str, ...]
) -> None:
    """Raise UserError unless weights read back equal and the package does what the reference did.

    weights: the base's canonical arrays. The package runs on the reference executor in float32: the
    first steps of the first golden prompt, or a smoke run where the bundle has no traces.
    """
    entry = bundle.adapter(adapter.app)
    if "mlx" in targets:
        check_tensors(bundle, "mlx/base.safetensors", weights)
    lora = {f"lora.{n}.{f}": t for n, pair in adapter.lora.items() for f, t in zip("ab", pair, strict=True)}
    check_tensors(bundle, entry.tensor_file, {**adapter.tensors, **lora})
    if "coreml" in targets:
        check_package(bundle, entry, base)


def is_exact_in_half(weights: dict[str, np.ndarray]) -> bool:
    """Whether rounding to float16 leaves every weight as it is."""
    return all(np.array_equal(w.astype(np.float16).astype(w.dtype), w) for w in weights.values())


def check_tensors(bundle: Bundle, name: str, source: dict[str, np.ndarray]) -> None:
    """A written file holds `source` rounded to float16."""
    written = read_tensors(bundle.path / name)
    for tensor, values in source.items():
        expected = np.asarray(values).astype(np.float16)
        if tensor not in written or not np.array_equal(written[tensor], expected):
            raise UserError(f"check failed: tensor '{tensor}' in {name} is not what was converted")


def check_package(bundle: Bundle, entry: BundledAdapter, base: BaseFolder) -> None:
    """Run the fresh package on the executor and compare with the golden trace."""
    from ss_runtime.coreml_model import open_executor_model
    from ss_runtime.validation import Replay, has_exact_weights, replay

    model = open_executor_model(bundle, entry, arithmetic="float32")
    if entry.golden is None:
        token = base.architecture.bos_id or 0
        proposal = model.prefill([token])
        verified = model.step(root_only(proposal.root))
        if not np.all(np.isfinite(verified.stream_logits)):
            raise UserError("check failed: the Core ML package gives logits that are not finite")
        return
    trace = load_traces(bundle.path / entry.golden)[0]
    found = Replay("executor", "float32", has_exact_weights(bundle, entry, "executor"))
    replay(model, [trace], found, CHECKED_STEPS)
    if found.failures:
        raise UserError(f"check failed: Core ML package against the reference: {found.failures[0]}")
