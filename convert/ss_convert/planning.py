"""What a conversion will do, checked before any heavy work: folders, identity, sizes, prompts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from ss_convert import golden, tokens_beyond
from ss_convert.coreai_options import check_installed, coreai_options, large_state_notes
from ss_convert.graph.interface import function_names
from ss_convert.graph.options import GraphOptions, check_adapter
from ss_convert.graph.parts import choose_cuts, part_names
from ss_convert.inputs import Inputs, default_output, read_inputs
from ss_convert.lora_inputs import check_shared_functions, with_lora_rank
from ss_convert.package_settings import resolve_settings, settings_of_bundle
from ss_convert.provenance import folder_digests, inputs_digest
from ss_convert.settings import (
    DEFAULT_TARGETS,
    FUNCTION_DTYPES,
    TARGETS,
    ConversionSettings,
    PackageSettings,
)
from ss_device.adapter import Adapter
from ss_device.base_model import BaseFolder
from ss_device.bundle import Bundle, asset_path, package_path
from ss_device.config import PRUNE_OVER
from ss_device.errors import UserError
from ss_device.settings import check_values, flag_of

# Settings that golden traces and exported functions follow as well; all others concern the packages alone.
SIZES = ("num_nodes", "context", "chunk")


@dataclass(frozen=True)
class PlannedAdapter:
    """One adapter of a plan. prompts: text and token ids of its golden prompts."""

    adapter: Adapter
    folder: Path
    options: GraphOptions
    prompts: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def app(self) -> str:
        return self.adapter.app


@dataclass(frozen=True)
class Plan:
    """Checked settings: everything that fits together, nothing heavy done yet.

    into: the bundle that is extended, None for a new one; inputs: digest of all that determines the
    bundle; function_dtype: of exported MLX functions; device: as in `ConversionSettings`.
    """

    adapters: tuple[PlannedAdapter, ...]
    base: BaseFolder
    output: Path
    into: Bundle | None
    targets: tuple[str, ...]
    package: PackageSettings
    golden: bool
    inputs: str
    function_dtype: str = FUNCTION_DTYPES[0]
    device: str | None = None

    @property
    def notes(self) -> list[str]:
        """What the user should know of the inputs."""
        name = self.base.identity.name
        return [
            f"base '{name}' is quantized: taken for a copy of '{planned.adapter.base.name}', on which "
            f"'{planned.app}' was trained"
            for planned in self.adapters
            if planned.adapter.base.sha256 != self.base.identity.sha256
        ] + self._notes_of_functions()

    def _notes_of_functions(self) -> list[str]:
        notes = tokens_beyond.notes(self.base.path / "tokenizer.json", self.base.architecture.vocab_size)
        if "coreai" in self.targets:
            notes += large_state_notes(coreai_options(self.adapters[0].options, self.package.coreai_cache))
        return notes

    @property
    def packages(self) -> tuple[str, ...]:
        """Paths of the Core ML packages inside the bundle: one per part, each for all adapters."""
        return tuple(package_path(name) for name in self._part_names(".mlpackage"))

    @property
    def assets(self) -> tuple[str, ...]:
        """The same of the Core AI assets."""
        return tuple(asset_path(name) for name in self._part_names(".aimodel"))

    def _part_names(self, suffix: str) -> tuple[str, ...]:
        name = self.base.identity.name.rpartition("/")[2]
        return part_names(name, len(self.package.cuts) + 1, suffix)


def plan_conversion(settings: ConversionSettings) -> Plan:
    """Find adapters and base and check that they, the sizes and the output fit (UserError if not)."""
    check_settings(settings)
    inputs = read_inputs(settings)
    targets = chosen_targets(settings.targets, inputs.into)
    refuse_without_effect(settings, targets)
    package = shared_settings(settings.package, inputs, targets)
    package, options = function_options(settings, package, inputs)
    planned = tuple(
        _plan_adapter(settings, adapter, folder, inputs.base, options)
        for adapter, folder in zip(inputs.adapters, inputs.folders, strict=True)
    )
    check_shared_functions(planned, inputs.into)
    plan = Plan(
        adapters=planned,
        base=inputs.base,
        output=settings.into or settings.output or default_output(inputs.adapters[0]),
        into=inputs.into,
        targets=targets,
        package=package,
        golden=settings.golden,
        inputs="",
        function_dtype=settings.function_dtype or FUNCTION_DTYPES[0],
        device=settings.device,
    )
    return replace(plan, inputs=_digest(plan))


def check_settings(settings: ConversionSettings) -> None:
    """UserError for what is wrong whatever the inputs are."""
    check_values(settings)
    parts = settings.parts
    if parts is not None and parts != "auto" and (not isinstance(parts, int) or parts < 1):
        raise UserError(f"parts {parts!r:.60} is neither a number from 1 up nor 'auto'")
    golden.check_device(settings.device)


def chosen_targets(targets: tuple[str, ...] | None, into: Bundle | None) -> tuple[str, ...]:
    """The targets that the user names, those of the bundle that is extended, or the default ones."""
    if unknown := [target for target in targets or () if target not in TARGETS]:
        raise UserError(f"target {unknown[0]!r:.60} is not one of {', '.join(TARGETS)}")
    if targets is not None and "mlxfn" in targets and "mlx" not in targets:
        raise UserError("target 'mlxfn' is made from the MLX weights; add 'mlx'")
    if into is None:
        return targets or DEFAULT_TARGETS
    has = into.manifest.made.targets
    if targets is not None and set(targets) != set(has):
        raise UserError(f"{into.path}: has the targets {', '.join(has)}; leave --target out")
    return has


def refuse_without_effect(settings: ConversionSettings, targets: tuple[str, ...]) -> None:
    """UserError naming an option that has no effect for these targets."""
    if settings.device is not None and not settings.golden:
        raise UserError("--device is for recording golden traces; it has no effect with --no-golden")
    if settings.function_dtype is not None and "mlxfn" not in targets:
        raise UserError("--mlxfn-dtype is for --target mlxfn or all")
    if settings.coreai_cache is not None and "coreai" not in targets:
        raise UserError("--coreai-cache is for --target coreai")
    if "coreml" in targets or "coreai" in targets:
        return
    coreml_only = [f.name for f in fields(PackageSettings) if f.name not in SIZES]
    said = [name for name in coreml_only if getattr(settings, name) is not None]
    if said:
        flag = flag_of(PackageSettings, said[0])
        raise UserError(
            f"{flag} is for Core ML packages and Core AI assets; it has no effect with --target "
            f"{'/'.join(targets)}"
        )
    if "mlxfn" not in targets and (settings.num_kept or settings.prune_in_graph):
        flag = "--keep" if settings.num_kept else "--prune-in-graph"
        raise UserError(
            f"{flag} is for Core ML packages, Core AI assets and exported MLX functions; add one to "
            "--target"
        )


def shared_settings(package: PackageSettings, inputs: Inputs, targets: tuple[str, ...]) -> PackageSettings:
    """What all functions have in common, every choice made but the cuts of a new bundle.

    UserError for adapters that cannot stand in one package, or in none.
    """
    if "coreai" in targets:
        check_installed()
    if "coreml" in targets or "coreai" in targets:
        for adapter in inputs.adapters:
            check_adapter(adapter)
    package = (
        resolve_settings(package, inputs.base)
        if inputs.into is None
        else settings_of_bundle(inputs.into, package)
    )
    _check_names(inputs, package)
    return with_lora_rank(package, inputs.adapters)


def _check_names(inputs: Inputs, package: PackageSettings) -> None:
    """Adapters and, where they are constants, their functions need names of their own."""
    there = () if inputs.into is None else inputs.into.manifest.adapters
    owners = {function_names(app): app for app in there}
    seen: set[str] = set()
    for adapter in inputs.adapters:
        if adapter.app in seen:
            raise UserError(f"adapter '{adapter.app}' is named twice")
        seen.add(adapter.app)
        if package.lora == "inputs":
            continue
        other = owners.setdefault(function_names(adapter.app), adapter.app)
        if other != adapter.app:
            raise UserError(
                f"adapters '{other}' and '{adapter.app}' would have functions of the same name "
                f"'{function_names(other)[1]}'; rename one"
            )


def function_options(
    settings: ConversionSettings, package: PackageSettings, inputs: Inputs
) -> tuple[PackageSettings, GraphOptions]:
    """The package's settings with the cuts that `parts` asks for, and the options of all functions.

    UserError for sizes that base or adapters do not have, and for pruning that they cannot do.
    """
    nodes, context, base = package.num_nodes, package.context, inputs.base
    if context > base.architecture.max_positions:
        raise UserError(
            f"context {context} exceeds the {base.architecture.max_positions} positions of base "
            f"'{base.identity.name}'"
        )
    kept = _num_kept(settings, nodes)
    for adapter in inputs.adapters:
        if kept < nodes and not adapter.config.pruning_rank:
            raise UserError(f"adapter '{adapter.app}' has no pruning head, which pruning (--keep) needs")
    if nodes > context:
        raise UserError(f"--nodes {nodes} exceeds the context of {context} tokens")
    options = package.graph_options(kept, settings.prune_over or PRUNE_OVER[0])
    if inputs.into is not None or package.parts == 1:
        return package, options
    cuts = choose_cuts(base.architecture, inputs.adapters, options, package.parts)
    return replace(package, parts=len(cuts) + 1, cuts=cuts), replace(options, cuts=cuts)


def _num_kept(settings: ConversionSettings, nodes: int) -> int:
    """Nodes left after pruning: what --keep says; all, or half of them with --prune-in-graph."""
    kept, prune = settings.num_kept, settings.prune_in_graph
    if kept is None:
        kept = max(1, nodes // 2) if prune else nodes
    if kept > nodes:
        raise UserError(f"--keep {kept} exceeds the {nodes} nodes of --nodes")
    if kept < nodes and prune is False:
        raise UserError("--no-prune-in-graph keeps every node; leave --keep out")
    if kept == nodes and prune:
        raise UserError(f"--prune-in-graph needs a --keep below the {nodes} nodes of --nodes")
    if kept == nodes and settings.prune_over is not None:
        raise UserError("--prune-over is for early-exit pruning; add --keep")
    return kept


def _plan_adapter(
    settings: ConversionSettings, adapter: Adapter, folder: Path, base: BaseFolder, options: GraphOptions
) -> PlannedAdapter:
    """An adapter with its golden prompts, where traces are wanted and can be recorded here."""
    file = settings.golden_prompts
    if file is None and (folder / golden.PROMPT_FILE).is_file():
        file = folder / golden.PROMPT_FILE
    wanted = settings.golden and file is not None and golden.reference_available()
    prompts = golden.read_prompts(file, adapter, base, options.context) if wanted else ()
    return PlannedAdapter(adapter, folder, options, prompts)


def _digest(plan: Plan) -> str:
    """Digest of all that determines the bundle: base, adapter files, options, prompts, targets."""
    return inputs_digest(
        {
            "into": plan.into and plan.into.manifest.made.inputs,
            "base": plan.base.identity.to_dict(),
            "adapters": [
                {
                    "files": folder_digests(planned.folder),
                    "options": asdict(planned.options),
                    "prompts": [list(ids) for _, ids in planned.prompts],
                }
                for planned in plan.adapters
            ],
            "targets": sorted(plan.targets),
            "function_dtype": plan.function_dtype if "mlxfn" in plan.targets else None,
            "golden": (plan.golden, plan.device),
        }
    )
