"""From base and adapter folders to a bundle: resumable stages in a folder beside the target.

Stages: mlx → coreml → golden → check → manifest, then one rename. A killed conversion leaves the
earlier bundle as it was; the next run with the same inputs reuses the stages that were finished.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ss_convert import golden
from ss_convert.check import check_bundle, is_exact_in_half
from ss_convert.planning import Plan, library_versions
from ss_convert.stages import Stages
from ss_device.base_model import TOKENIZER_FILES, BaseFolder
from ss_device.bundle import (
    Bundle,
    BundledAdapter,
    CoreMLFunctions,
    Manifest,
    open_bundle,
    write_manifest,
)
from ss_device.config import parameter_count
from ss_device.errors import UserError
from ss_device.files import folder_in_one_go
from ss_device.trace import save_traces

NUM_STAGES = 5
Report = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """What a conversion did. seconds by stage; reused: stages taken from an earlier run."""

    bundle: Bundle
    seconds: dict[str, float]
    reused: tuple[str, ...]
    notes: tuple[str, ...]


def existing_bundle(plan: Plan) -> Bundle | None:
    """The bundle at the target when it is whole and was made from the very same inputs."""
    try:
        bundle = open_bundle(plan.output, verify=True)
    except UserError:
        return None
    return bundle if bundle.manifest.made.get("inputs") == plan.inputs else None


def convert(plan: Plan, report: Report = lambda text: None) -> Outcome:
    """Run all stages and put the bundle in place. `report` is told what starts.

    Raises UserError for bad input; whatever fails, an earlier bundle at the target stays.
    """
    plan.output.parent.mkdir(parents=True, exist_ok=True)
    with folder_in_one_go(plan.output, keep_partial=True) as folder:
        stages = Stages(folder, plan.inputs, report)
        weights = _Weights(plan.base)
        manifest = _manifest(plan, _write_files(plan, stages, folder, weights))
        stages.run("check", lambda: _check(Bundle(folder, manifest), plan, weights))
        report("manifest")
        stages.forget()
        _make_readable(folder)
        write_manifest(folder, manifest)
    return Outcome(open_bundle(plan.output), stages.seconds, tuple(stages.reused), tuple(stages.notes))


def _write_files(plan: Plan, stages: Stages, folder: Path, weights: _Weights) -> dict[str, dict]:
    """Run the stages that write files; their results by name."""
    results = {"mlx": stages.run("mlx", lambda: _write_mlx(plan, folder, weights), "mlx")}
    if "coreml" in plan.targets:
        results["coreml"] = stages.run("coreml", lambda: _write_coreml(plan, folder, weights), "coreml")
    results["golden"] = stages.run("golden", lambda: _write_golden(plan, folder), "golden")
    if note := results["golden"].get("note"):
        stages.notes.append(note)
    return results


def _manifest(plan: Plan, results: dict[str, dict]) -> Manifest:
    app, architecture = plan.adapter.app, plan.base.architecture
    adapter = BundledAdapter(
        app=app,
        config=plan.adapter.config,
        prompt_template=plan.adapter.prompt_template,
        stop_strings=plan.adapter.stop_strings,
        max_tokens=plan.adapter.max_tokens,
        num_nodes=plan.sizes.num_nodes,
        tensor_file=_tensor_file(plan),
        parameters=parameter_count(plan.adapter.config, architecture),
        rank_statistics=plan.adapter.rank_statistics,
        coreml=CoreMLFunctions(**results["coreml"]) if "coreml" in results else None,
        golden=f"golden/{app}" if results["golden"]["prompts"] else None,
    )
    made = {
        "inputs": plan.inputs,
        "versions": library_versions(),
        "targets": sorted(plan.targets),
        "exact_weights": results["mlx"]["exact_weights"],
    }
    return Manifest(architecture, plan.base.identity, {app: adapter}, made=made)


def _tensor_file(plan: Plan) -> str:
    return f"mlx/adapters/{plan.adapter.app}.safetensors"


def _make_readable(folder: Path) -> None:
    """The permissions of an ordinary new file; some writers leave files that only their owner reads."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


class _Weights:
    """The base's weights, read once and only if some stage needs them."""

    def __init__(self, base: BaseFolder) -> None:
        self._base = base
        self._weights: dict | None = None

    def get(self) -> dict:
        if self._weights is None:
            self._weights = self._base.weights()
        return self._weights


def _write_mlx(plan: Plan, folder: Path, weights: _Weights) -> dict:
    """Tokenizer, base weights (target mlx) and, always, the adapter: hosts need the parent bias."""
    from ss_convert.mlx.weights import write_adapter, write_base

    for name in TOKENIZER_FILES:
        if (plan.base.path / name).is_file():
            shutil.copyfile(plan.base.path / name, folder / name)
    if "mlx" in plan.targets:
        (folder / "mlx").mkdir()
        write_base(weights.get(), folder / "mlx" / "base.safetensors")
    tensor_file = folder / _tensor_file(plan)
    tensor_file.parent.mkdir(parents=True)
    write_adapter(plan.adapter, tensor_file)
    return {"exact_weights": is_exact_in_half(weights.get())}


def _write_coreml(plan: Plan, folder: Path, weights: _Weights) -> dict:
    try:
        import coremltools  # noqa: F401
    except ImportError as error:
        raise UserError(
            "coremltools is not installed (pip install 'ss-device[convert]', or --target mlx)"
        ) from error
    from ss_convert.coreml.convert import CoreMLOptions, write_package

    sizes = plan.sizes
    options = CoreMLOptions(
        num_nodes=sizes.num_nodes,
        num_kept=sizes.num_kept,
        context=sizes.context,
        chunk=sizes.chunk,
        prune_over=sizes.prune_over,
    )
    package = folder / sizes.package
    package.parent.mkdir(parents=True)
    written = write_package(plan.base.architecture, weights.get(), plan.adapter, options, package)
    return asdict(replace(written, package=sizes.package))


def _write_golden(plan: Plan, folder: Path) -> dict:
    """Traces of the reference, of the adapter folder, or none with a note that says why."""
    stem = folder / "golden" / plan.adapter.app
    sizes = plan.sizes
    if not plan.golden:
        return {"prompts": 0, "note": "golden traces left out (--no-golden)"}
    if golden.reference_available() and plan.prompts:
        traces = golden.record_traces(plan.base, plan.adapter, plan.prompts, sizes)
        save_traces(traces, stem)
        return {"prompts": len(traces)}
    traces = golden.traces_of_folder(plan.adapter_folder, sizes.num_nodes, sizes.num_kept)
    if traces is not None:
        save_traces(traces, stem)
        return {"prompts": len(traces), "note": "golden traces are those of the adapter folder"}
    why = (
        "no golden prompts (give --golden-prompts)"
        if golden.reference_available()
        else "PyTorch is not installed"
    )
    return {"prompts": 0, "note": f"golden traces skipped: {why}; ss-validate has nothing to replay"}


def _check(bundle: Bundle, plan: Plan, weights: _Weights) -> dict:
    check_bundle(bundle, plan.adapter, plan.base, weights.get(), plan.targets)
    return {}
