"""From base and adapter folders to a bundle: resumable stages in a folder beside the target.

Stages: mlx → mlxfn of each adapter → coreml (functions of each adapter, then one package) → coreai →
golden → check → manifest, then one rename. A killed conversion leaves the earlier bundle as it was; the
next run with the same inputs reuses the stages that were finished.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from ss_convert import coreai_stage, coreml_stage, golden_stage, mlxfn_stage
from ss_convert.check import check_adapter, check_base, is_exact_in_half
from ss_convert.disk import one_line_when_full
from ss_convert.inputs import output_folder
from ss_convert.mlx.weights import bigram_bias_file, write_adapter, write_base, write_bigram_bias
from ss_convert.planning import Plan, PlannedAdapter, plan_conversion
from ss_convert.provenance import library_versions
from ss_convert.settings import ConversionSettings
from ss_convert.stages import Stages
from ss_convert.weight_source import WeightSource
from ss_device.base_model import TOKENIZER_FILES
from ss_device.bundle import (
    ASSETS,
    MANIFEST,
    MLX_BASE,
    PACKAGES,
    Bundle,
    BundledAdapter,
    Made,
    Manifest,
    MLXFunctions,
    inputs_of,
    is_bundle,
    open_bundle,
    step_functions,
    tensor_file,
    write_manifest,
)
from ss_device.config import parameter_count
from ss_device.errors import UserError
from ss_device.outputs import check_output_folder, discard_partial, folder_in_one_go, output_lock

Report = Callable[[str], None]
UP_TO_DATE = "up to date: same inputs, nothing was converted (--force)"


@dataclass(frozen=True)
class Outcome:
    """What a conversion did. seconds by stage; reused: stages taken from an earlier run."""

    bundle: Bundle
    seconds: dict[str, float]
    reused: tuple[str, ...]
    notes: tuple[str, ...]


def make_bundle(
    settings: ConversionSettings, force: bool, reporting: Callable[[int], AbstractContextManager[Report]]
) -> tuple[Plan, Outcome]:
    """Make the bundle that the settings say, unless it is there already, made from the same inputs.

    force: make it anew, and replace another bundle; reporting: number of stages → a block that yields what
    is told of each. Raises UserError for bad input, and where the output holds what may not be replaced.
    """
    # From the first look at a bundle to its replacement: what another process adds must not be lost.
    with output_lock(output_folder(settings)):
        plan = plan_conversion(settings)
        if not force and (bundle := existing_bundle(plan)):
            discard_partial(plan.output)
            return plan, Outcome(bundle, {}, (), (UP_TO_DATE,))
        _check_replaced(plan, force)
        with reporting(num_stages(plan)) as report:
            return plan, run_plan(plan, report)


def _check_replaced(plan: Plan, force: bool) -> None:
    """UserError where the output holds a bundle, unless it is extended or is to be replaced.

    Also for a bundle that holds files of the user's own, which would go with it. A damaged one from the
    same inputs is mended.
    """
    if plan.into is None:
        damaged = inputs_of(plan.output) == plan.inputs
        check_output_folder(plan.output, "a bundle", is_bundle, force or damaged)


def num_stages(plan: Plan) -> int:
    """How many stages `run_plan` reports."""
    per_adapter = 1 + ("coreml" in plan.targets) + ("mlxfn" in plan.targets)
    return 5 + ("coreai" in plan.targets) + per_adapter * len(plan.adapters)


def existing_bundle(plan: Plan) -> Bundle | None:
    """The bundle at the target when it is whole and was made from the very same inputs."""
    try:
        bundle = open_bundle(plan.output, verify=True)
    except UserError:
        return None
    return bundle if bundle.manifest.made.inputs == plan.inputs else None


def run_plan(plan: Plan, report: Report = lambda text: None) -> Outcome:
    """Run all stages and put the bundle in place. `report` is told what starts.

    Raises UserError for bad input; whatever fails, an earlier bundle at the target stays.
    """
    plan.output.parent.mkdir(parents=True, exist_ok=True)
    with one_line_when_full(plan.output), folder_in_one_go(plan.output, keep_partial=True) as folder:
        stages = Stages(folder, plan.inputs, report)
        stages.notes += plan.notes
        weights = WeightSource(plan.base)
        manifest = _manifest(plan, _write_files(plan, stages, folder, weights))
        try:
            left_out = stages.run("check", lambda: _check(Bundle(folder, manifest), plan, weights))
            stages.notes += left_out["notes"]
        except UserError:
            stages.forget()  # what was written is not right: the next run makes it anew
            raise
        report("manifest")
        stages.forget()
        coreml_stage.remove_functions(folder)
        _make_readable(folder)
        write_manifest(folder, manifest)
        open_bundle(folder)  # what cannot be opened takes no earlier bundle's place
    return Outcome(open_bundle(plan.output), stages.seconds, tuple(stages.reused), tuple(stages.notes))


def _write_files(plan: Plan, stages: Stages, folder: Path, weights: WeightSource) -> dict[str, dict]:
    """Run the stages that write files; their results by name."""
    results = {"mlx": stages.run("mlx", lambda: _write_mlx(plan, folder, weights))}
    if "mlxfn" in plan.targets:
        for planned in plan.adapters:
            entry, name = _entry(plan, planned), f"mlxfn {planned.app}"
            results[name] = stages.run(
                name, lambda p=planned, entry=entry: mlxfn_stage.write(plan, entry, p, folder)
            )
    if "coreml" in plan.targets:
        for planned in plan.adapters:
            stages.run(
                f"coreml {planned.app}",
                lambda planned=planned: coreml_stage.write_functions(plan, planned, folder, weights),
            )
        # What follows works on files, and the check needs memory of its own.
        weights.release()
        results["coreml"] = stages.run("coreml", lambda: coreml_stage.merge(plan, folder))
        results["sizes"] = stages.run("sizes", lambda: coreml_stage.sizes(plan, folder, results["coreml"]))
    if "coreai" in plan.targets:
        results["coreai"] = stages.run("coreai", lambda: coreai_stage.write(plan, folder, weights))
        weights.release()
    for planned in plan.adapters:
        name = f"golden {planned.app}"
        results[name] = stages.run(name, lambda planned=planned: golden_stage.write(plan, planned, folder))
        stages.notes += [note for note in results[name]["notes"] if note not in stages.notes]
    return results


def _manifest(plan: Plan, results: dict[str, dict]) -> Manifest:
    architecture = plan.base.architecture
    functions = {target: results.get(target, {}) for target in ("coreml", "coreai")}
    earlier = {} if plan.into is None else plan.into.manifest.adapters
    adapters = {
        app: replace(
            entry, **{t: step_functions(found[app]) for t, found in functions.items() if app in found}
        )
        for app, entry in earlier.items()
    }
    for planned in plan.adapters:
        entry = _entry(plan, planned, functions, results[f"golden {planned.app}"])
        exported = results.get(f"mlxfn {planned.app}")
        adapters[planned.app] = replace(entry, mlxfn=exported and MLXFunctions(**exported))
    exact = results["mlx"]["exact_weights"] and (plan.into is None or plan.into.manifest.made.exact_weights)
    made = Made(
        inputs=plan.inputs,
        versions=library_versions(),
        targets=tuple(sorted(plan.targets)),
        package=plan.package.to_dict(),
        exact_weights=exact,
        package_bytes=results.get("sizes", {}),
    )
    return Manifest(architecture, plan.base.identity, adapters, made=made)


def _entry(
    plan: Plan, planned: PlannedAdapter, functions: dict | None = None, golden: dict | None = None
) -> BundledAdapter:
    """The manifest's entry, as far as stages have run."""
    adapter, golden = planned.adapter, golden or {"base": None, "stored": None}
    made = {
        target: replace(step_functions(found[planned.app]), golden=golden["stored"])
        for target, found in (functions or {}).items()
        if planned.app in found
    }
    return BundledAdapter(
        app=planned.app,
        config=adapter.config,
        prompt_template=adapter.prompt_template,
        stop_strings=adapter.stop_strings,
        max_tokens=adapter.max_tokens,
        num_nodes=planned.options.num_nodes,
        tensor_file=tensor_file(planned.app),
        parameters=parameter_count(adapter.config, plan.base.architecture),
        rank_statistics=adapter.rank_statistics,
        golden=golden["base"],
        **made,
        bigram_bias_file=bigram_bias_file(adapter),
    )


def _make_readable(folder: Path) -> None:
    """The permissions of an ordinary new file; some libraries make theirs readable to the owner only."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


def _write_mlx(plan: Plan, folder: Path, weights: WeightSource) -> dict:
    """Tokenizer, base weights (target mlx) and, always, the adapters: hosts need the bigram bias."""
    if plan.into is not None:
        _copy_files(plan.into, folder, {planned.app for planned in plan.adapters})
    else:
        for name in (*TOKENIZER_FILES, "config.json"):
            if (plan.base.path / name).is_file():
                shutil.copyfile(plan.base.path / name, folder / name)
        if "mlx" in plan.targets:
            write_base(weights.get(), folder / MLX_BASE)
    for planned in plan.adapters:
        file = folder / tensor_file(planned.app)
        file.unlink(missing_ok=True)
        write_adapter(planned.adapter, file)
        write_bigram_bias(planned.adapter, folder)
    exact = all(is_exact_in_half(p.adapter.lora_tensors()) for p in plan.adapters)
    in_half = bool({"coreml", "coreai"} & set(plan.targets))
    if in_half or not weights.get().packed:  # else the base is stored as it is
        exact = exact and is_exact_in_half(weights.get())
    return {"exact_weights": exact}


def _copy_files(bundle: Bundle, folder: Path, replaced: set[str]) -> None:
    """All files of an earlier bundle but its packages, which are merged anew, and what only adapters
    that are replaced have shared."""
    entries = bundle.manifest.adapters.values()
    left = {e.bigram_bias_file for e in entries} - {
        e.bigram_bias_file for e in entries if e.app not in replaced
    }
    for name in bundle.manifest.files:
        if name != MANIFEST and not name.startswith((f"{PACKAGES}/", f"{ASSETS}/")) and name not in left:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle.path / name, folder / name)


def _check(bundle: Bundle, plan: Plan, weights: WeightSource) -> dict:
    """Base weights once, then every new adapter; what an earlier bundle held was checked with it."""
    if "mlx" in plan.targets:
        check_base(bundle, weights.get())
    notes: dict[str, None] = {}
    for planned in plan.adapters:
        notes |= dict.fromkeys(check_adapter(bundle, planned.adapter, plan.base, plan.targets))
    return {"notes": list(notes)}
