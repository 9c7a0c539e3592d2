"""The golden stage: traces of the reference with the base's weights, and with those the package holds."""

from __future__ import annotations

from pathlib import Path

from ss_convert import golden
from ss_convert.planning import Plan, PlannedAdapter
from ss_device.bundle import golden_stem
from ss_device.trace import save_traces, trace_record


def write(plan: Plan, planned: PlannedAdapter, folder: Path) -> dict:
    """Traces of the reference, of the adapter folder, or none with a note that says why.

    → stems inside the bundle: `base` (the base's own weights) and, for packages and assets with compressed
    weights, `stored` (the weights read back from them); notes.
    """
    stem = golden_stem(planned.app)
    nothing = {"base": None, "stored": None}
    if not plan.golden:
        return nothing | {"notes": ["golden traces left out (--no-golden)"]}
    if golden.reference_available() and planned.prompts:
        _record(plan, planned, folder / stem)
        stored = _write_stored(plan, planned, folder) if _is_compressed(plan, planned) else None
        return {"base": stem, "stored": stored, "notes": []}
    options = planned.options
    traces = golden.traces_of_folder(planned.folder, options.num_nodes, options.num_kept)
    if traces is not None and not _is_compressed(plan, planned):
        save_traces(traces, folder / stem, trace_record(planned.folder / golden.TRACE_STEM))
        note = "golden traces are those of the adapter folder"
        return nothing | {"base": stem, "notes": [note]}
    why = "no golden prompts (give --golden-prompts)"
    if not golden.reference_available():
        why = "PyTorch is not installed"
    note = f"golden traces skipped: {why}; ss-validate has nothing to replay"
    return nothing | {"notes": [note]}


def _is_compressed(plan: Plan, planned: PlannedAdapter) -> bool:
    return bool({"coreml", "coreai"} & set(plan.targets)) and planned.options.compresses


def _record(plan: Plan, planned: PlannedAdapter, stem: Path, weights: dict | None = None) -> None:
    traces, recorded = golden.record_traces(
        plan.base, planned.adapter, planned.prompts, planned.options, weights, plan.device
    )
    save_traces(traces, stem, recorded)


def _write_stored(plan: Plan, planned: PlannedAdapter, folder: Path) -> str:
    """With what the package holds; without one with what compression makes: the check runs the asset."""
    from ss_convert.graph.functions import base_weights
    from ss_convert.graph.interface import functions_of
    from ss_convert.stored_weights import compressed_weights, stored_weights

    stem = golden_stem(planned.app, stored=True)
    architecture, options, weights = plan.base.architecture, planned.options, plan.base.weights()
    if "coreml" in plan.targets:
        packages = [folder / package for package in plan.packages]
        step = functions_of(planned.app, options)[1]
        dense = stored_weights(packages, step, weights, architecture)
    else:
        dense = compressed_weights(base_weights(architecture, weights, options), weights)
    _record(plan, planned, folder / stem, dense)
    return stem
