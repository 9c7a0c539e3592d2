"""The Core AI stage: the functions of all adapters in one asset, or one asset per part.

One asset also holds the base as a plain model, and beside it is what Apple's tools read it by.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from ss_convert.coreai.language_bundle import write_language_bundle
from ss_convert.coreai.plain_function import MAIN, plain_function
from ss_convert.coreai_options import coreai_options, why_no_main
from ss_convert.graph.description import describe, package_metadata
from ss_convert.graph.functions import GraphFunction, adapter_functions
from ss_convert.graph.options import GraphOptions
from ss_convert.graph.parts import Part, parts_of
from ss_convert.planning import Plan, PlannedAdapter
from ss_convert.weight_source import WeightSource
from ss_device.bundle import BundledAdapter, StepFunctions
from ss_device.config import SpeculativeConfig


def write(plan: Plan, folder: Path, weights: WeightSource) -> dict[str, dict]:
    """Write the asset, or one per part → the manifest's `coreai` entry of every adapter in it."""
    from ss_convert.coreai.asset import write_asset

    architecture = plan.base.architecture
    entries: dict[str, tuple[SpeculativeConfig, StepFunctions]] = {
        app: (entry.config, entry.coreai) for app, entry in _kept_adapters(plan).items()
    }
    for planned in plan.adapters:
        options = _options(plan, planned)
        functions = describe(planned.adapter, architecture, options, plan.assets)
        entries[planned.app] = (planned.adapter.config, functions)
    cuts = plan.adapters[0].options.cuts
    for index, (part, asset) in enumerate(zip(parts_of(architecture, cuts), plan.assets, strict=True)):
        path = folder / asset
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        earlier = _earlier(plan, index)
        write_asset(
            [*_functions(plan, part, weights), *([] if earlier else _plain(plan, weights))],
            path,
            package_metadata(plan.base.identity, entries, index),
            half_only=plan.package.preset == "ane",
            earlier=earlier,
        )
    if why_no_main(_options(plan, plan.adapters[0])) is None:
        write_language_bundle(folder / plan.assets[0], plan.base, plan.package.context)
    return {app: asdict(functions) for app, (_, functions) in entries.items()}


def _options(plan: Plan, planned: PlannedAdapter) -> GraphOptions:
    return coreai_options(planned.options, plan.package.coreai_cache)


def _functions(plan: Plan, part: Part, weights: WeightSource) -> Iterator[GraphFunction]:
    """The functions of the adapters that are converted; those that take adapters as inputs once."""
    for planned in plan.adapters:
        options = _options(plan, planned)
        if options.lora == "baked" or (plan.into is None and planned is plan.adapters[0]):
            stored = weights.stored(options)
            yield from adapter_functions(plan.base.architecture, stored, planned.adapter, options, part)


def _plain(plan: Plan, weights: WeightSource) -> list[GraphFunction]:
    """`main`, where the asset has one."""
    first = plan.adapters[0]
    options = _options(plan, first)
    if why_no_main(options) is not None:
        return []
    return [plain_function(plan.base.architecture, weights.stored(options), first.adapter.config, options)]


def _kept_adapters(plan: Plan) -> dict[str, BundledAdapter]:
    """Adapters of the extended bundle that are not converted again."""
    new = {planned.app for planned in plan.adapters}
    found = {} if plan.into is None else plan.into.manifest.adapters
    return {app: entry for app, entry in found.items() if app not in new and entry.coreai is not None}


def _earlier(plan: Plan, part: int) -> tuple[Path, set[str]] | None:
    """The asset of the bundle that is extended, and its functions that stay; a damaged one is refused."""
    from ss_runtime.coreai.asset_probe import check_assets

    if plan.into is None:
        return None
    kept = _kept_adapters(plan)
    if plan.package.lora == "inputs":
        kept = {app: entry for app, entry in plan.into.manifest.adapters.items() if entry.coreai}
    if not kept:
        return None
    names = {name for entry in kept.values() for name in (entry.coreai.prefill, entry.coreai.step)}
    first = next(iter(kept.values()))
    check_assets(plan.into, first)
    return plan.into.path / first.coreai.packages[part], names | {MAIN}
