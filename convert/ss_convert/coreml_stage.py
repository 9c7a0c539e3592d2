"""The Core ML stages: every adapter's functions on their own, then one package per part of all."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

from ss_convert.planning import Plan, PlannedAdapter
from ss_convert.weight_source import WeightSource
from ss_device.bundle import BundledAdapter, StepFunctions
from ss_device.config import SpeculativeConfig
from ss_device.errors import UserError

FUNCTIONS = "functions"


def write_functions(plan: Plan, planned: PlannedAdapter, folder: Path, weights: WeightSource) -> dict:
    """Build an adapter's functions, part by part, and save each as a package of its own.

    Functions that take adapters as inputs are built once, with the first adapter.
    """
    if not _is_built(plan, planned):
        return {}
    _require_coremltools()
    from ss_convert.coreml.convert import build_programs
    from ss_convert.coreml.package import save_functions
    from ss_convert.graph.parts import parts_of

    architecture, options = plan.base.architecture, planned.options
    shutil.rmtree(folder / FUNCTIONS / planned.app, ignore_errors=True)
    stored = weights.stored(options)
    for index, part in enumerate(parts_of(architecture, options.cuts)):
        programs = build_programs(architecture, stored, planned.adapter, options, part)
        save_functions(programs, _functions_folder(folder, planned.app, index))
    return {}


def _is_built(plan: Plan, planned: PlannedAdapter) -> bool:
    """Whether the adapter needs functions that are not there: where adapters are inputs, the first one."""
    return planned.options.lora == "baked" or (plan.into is None and planned is plan.adapters[0])


def _functions_folder(folder: Path, app: str, part: int) -> Path:
    """Where the functions of one part wait to be merged."""
    return folder / FUNCTIONS / app / str(part)


def merge(plan: Plan, folder: Path) -> dict[str, dict]:
    """A package per part from the new adapters' functions and those of the bundle that is extended.

    → the manifest's `coreml` entry of every adapter in the packages.
    """
    from ss_convert.coreml.package import merge_functions
    from ss_convert.graph.description import describe, package_metadata

    architecture = plan.base.architecture
    entries: dict[str, tuple[SpeculativeConfig, StepFunctions]] = {
        app: (entry.config, entry.coreml) for app, entry in _kept_adapters(plan).items()
    }
    for planned in plan.adapters:
        functions = describe(planned.adapter, architecture, planned.options, plan.packages)
        entries[planned.app] = (planned.adapter.config, functions)
    default = next(iter(entries.values()))[1].step
    for index, package in enumerate(plan.packages):
        metadata = package_metadata(plan.base.identity, entries, index)
        merge_functions(_sources(plan, folder, index), default, metadata, folder / package)
    return {app: asdict(functions) for app, (_, functions) in entries.items()}


def _kept_adapters(plan: Plan) -> dict[str, BundledAdapter]:
    """Adapters of the extended bundle that are not converted again."""
    new = {planned.app for planned in plan.adapters}
    found = {} if plan.into is None else plan.into.manifest.adapters
    return {app: entry for app, entry in found.items() if app not in new and entry.coreml is not None}


def _sources(plan: Plan, folder: Path, part: int) -> dict[str, tuple[Path, str]]:
    """Function → (package, its function there) of all functions of a part."""
    from ss_convert.coreml.package import function_path
    from ss_convert.graph.interface import functions_of

    sources: dict[str, tuple[Path, str]] = {}
    kept = _kept_adapters(plan)
    if plan.into is not None and plan.package.lora == "inputs":
        kept = {app: entry for app, entry in plan.into.manifest.adapters.items() if entry.coreml}
    for entry in kept.values():
        package = plan.into.path / entry.coreml.packages[part]
        sources |= {name: (package, name) for name in (entry.coreml.prefill, entry.coreml.step)}
    for planned in plan.adapters:
        for name in functions_of(planned.app, planned.options) if _is_built(plan, planned) else ():
            own = _functions_folder(folder, planned.app, part)
            sources[name] = (function_path(own, name), "main")
    return sources


def sizes(plan: Plan, folder: Path, functions: dict[str, dict]) -> dict:
    """What the packages' weights take (`audit.report.package_sizes`); functions: the result of `merge`."""
    from ss_convert.audit.report import package_sizes

    apps: dict[str, str] = {}
    for app, entry in functions.items():
        for kind in ("prefill", "step"):
            apps[entry[kind]] = f"{apps[entry[kind]]}, {app}" if entry[kind] in apps else app
    return package_sizes([folder / package for package in plan.packages], apps)


def remove_functions(folder: Path) -> None:
    """Drop the packages of single functions once the merged one was checked."""
    shutil.rmtree(folder / FUNCTIONS, ignore_errors=True)


def _require_coremltools() -> None:
    try:
        import coremltools  # noqa: F401
    except ImportError as error:
        raise UserError(
            "coremltools is not installed (pip install 'ss-device[convert]', or --target mlx)"
        ) from error
