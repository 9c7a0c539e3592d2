"""The stage of exported MLX functions: one file per adapter, made by the MLX runtime from its weights."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from ss_convert.planning import Plan, PlannedAdapter
from ss_device.bundle import Bundle, BundledAdapter, Manifest
from ss_device.errors import UserError


def write(plan: Plan, entry: BundledAdapter, planned: PlannedAdapter, folder: Path) -> dict:
    """Export an adapter's prefill, step and commit into `folder`. → the manifest's `mlxfn` entry."""
    try:
        from ss_runtime.mlx.function_export import export_adapter, functions_of
    except ImportError as error:
        raise UserError("--target mlxfn needs MLX: pip install 'ss-device[runtime]'") from error
    options = planned.options
    functions = functions_of(
        planned.app,
        entry.config,
        num_nodes=options.num_nodes,
        num_kept=options.num_kept,
        prune_over=options.prune_over,
        context=options.context,
        chunk=options.chunk,
        dtype=plan.function_dtype,
    )
    unfinished = Bundle(folder, Manifest(plan.base.architecture, plan.base.identity, {planned.app: entry}))
    export_adapter(unfinished, entry, functions, folder / functions.file)
    return asdict(functions)
