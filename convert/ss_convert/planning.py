"""What a conversion will do, checked before any heavy work: folders, identity, sizes, prompts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ss_convert import golden, tokens_beyond
from ss_convert.coreml.interface import function_names
from ss_convert.coreml.options import CoreMLOptions, check_adapter
from ss_convert.coreml.parts import part_names
from ss_convert.lora_inputs import check_shared_functions, with_lora_rank
from ss_convert.package_settings import (
    COREML_ONLY,
    PackageSettings,
    flag_of,
    resolve_settings,
    settings_of_bundle,
)
from ss_device.adapter import Adapter, find_adapter, find_base, load_adapter
from ss_device.base_model import BaseFolder, models_folder, open_base
from ss_device.bundle import Bundle, open_bundle, package_path
from ss_device.command_line import program_version
from ss_device.errors import UserError
from ss_device.files import sha256

TARGETS = ("coreml", "mlx")
# By the name of a --target. Functions are made from the MLX weights, so a bundle has both.
TARGETS_OF = {"coreml": ("coreml",), "mlx": ("mlx",), "mlxfn": ("mlx", "mlxfn"), "both": TARGETS}
TARGETS_OF["all"] = (*TARGETS, "mlxfn")
FUNCTION_DTYPES = ("float16", "float32", "bfloat16")
LIBRARIES = ("coremltools", "numpy", "safetensors", "torch", "transformers")


@dataclass(frozen=True)
class Request:
    """What the user asked for. Sizes in tokens; what is not in `package` takes the default that fits.

    into: bundle that the adapters are added to, everything in it staying as it is; prune_in_graph: None
    where `num_kept` says it; function_dtype: of exported MLX functions; device: where the
    golden traces are recorded (`cpu`, `cuda`, `mps`; None: what is there).
    """

    adapters: tuple[str, ...]
    base: Path | None = None
    models: Path | None = None
    output: Path | None = None
    into: Path | None = None
    targets: tuple[str, ...] | None = None
    num_kept: int | None = None
    prune_over: str | None = None
    package: PackageSettings = PackageSettings()
    prune_in_graph: bool | None = None
    golden_prompts: Path | None = None
    golden: bool = True
    function_dtype: str | None = None
    device: str | None = None


@dataclass(frozen=True)
class PlannedAdapter:
    """One adapter of a plan. prompts: text and token ids of its golden prompts."""

    adapter: Adapter
    folder: Path
    options: CoreMLOptions
    prompts: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def app(self) -> str:
        return self.adapter.app


@dataclass(frozen=True)
class Plan:
    """A checked request: everything that fits together, nothing heavy done yet.

    into: the bundle that is extended, None for a new one; inputs: digest of all that determines the
    bundle; function_dtype: of exported MLX functions; device: as in `Request`.
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
        ] + tokens_beyond.notes(self.base.path / "tokenizer.json", self.base.architecture.vocab_size)

    @property
    def packages(self) -> tuple[str, ...]:
        """Paths of the Core ML packages inside the bundle: one per part, each for all adapters."""
        names = part_names(self.base.identity.name.rpartition("/")[2], len(self.package.cuts) + 1)
        return tuple(package_path(name) for name in names)


def plan_conversion(request: Request) -> Plan:
    """Find adapters and base and check that they, the sizes and the output fit (UserError if not)."""
    golden.check_device(request.device)
    models = _models(request)
    folders = [find_adapter(name, models) for name in request.adapters]
    adapters = [load_adapter(folder) for folder in folders]
    base = open_base(request.base or find_base(adapters[0], models))
    for adapter in adapters:
        adapter.check_base(base)
    into = _open_into(request, base)
    targets = _targets(request, into)
    _refuse_without_effect(request, targets)
    if "coreml" in targets:
        for adapter in adapters:
            check_adapter(adapter)
    package = (
        resolve_settings(request.package, base)
        if into is None
        else settings_of_bundle(into, request.package)
    )
    _check_names(adapters, into, package)
    package = with_lora_rank(package, adapters)
    planned = tuple(
        _planned(request, adapter, folder, base, package)
        for adapter, folder in zip(adapters, folders, strict=True)
    )
    check_shared_functions(planned, into)
    if into is None:
        package, planned = _divided(package, planned, base)
    return Plan(
        adapters=planned,
        base=base,
        output=_output(request, planned[0].app),
        into=into,
        targets=targets,
        package=package,
        golden=request.golden,
        inputs=_inputs_digest(request, planned, base, targets, into),
        function_dtype=request.function_dtype or FUNCTION_DTYPES[0],
        device=request.device,
    )


def _planned(request: Request, adapter: Adapter, folder: Path, base: BaseFolder, package: PackageSettings):
    options = _options(request, adapter, base, package)
    file = _prompt_file(request, folder)
    prompts = golden.read_prompts(file, adapter, base, options.context) if file else ()
    return PlannedAdapter(adapter, folder, options, prompts)


def _divided(
    package: PackageSettings, planned: tuple[PlannedAdapter, ...], base: BaseFolder
) -> tuple[PackageSettings, tuple[PlannedAdapter, ...]]:
    """PackageSettings and adapters with the cuts that `--parts` asks for."""
    if package.parts == 1:
        return package, planned
    from ss_convert.coreml.parts import choose_cuts

    adapters = [(p.adapter, p.options) for p in planned]
    cuts = choose_cuts(base.architecture, adapters, planned[0].options, package.parts)
    planned = tuple(replace(p, options=replace(p.options, cuts=cuts)) for p in planned)
    return replace(package, parts=len(cuts) + 1, cuts=cuts), planned


def _open_into(request: Request, base: BaseFolder) -> Bundle | None:
    """The bundle to extend, whole and made from this very base."""
    if request.into is None:
        return None
    if request.package.preset is not None:
        raise UserError(f"{request.into}: its packages are there already; leave --preset out")
    bundle = open_bundle(request.into, verify=True)
    theirs, ours = bundle.manifest.base, base.identity
    for what, old, new in (
        ("base", theirs.sha256, ours.sha256),
        ("tokenizer", theirs.tokenizer_sha256, ours.tokenizer_sha256),
    ):
        if old != new:
            raise UserError(
                f"{request.into}: was made from {what} '{theirs.name}' (sha256 {old[:12]}…), this "
                f"{what} is '{ours.name}' (sha256 {new[:12]}…); convert all adapters again"
            )
    return bundle


def _check_names(adapters: list[Adapter], into: Bundle | None, package: PackageSettings) -> None:
    """Adapters and, where they are constants, their functions need names of their own."""
    owners = {} if into is None else {function_names(app): app for app in into.manifest.adapters}
    seen: set[str] = set()
    for adapter in adapters:
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


def _targets(request: Request, into: Bundle | None) -> tuple[str, ...]:
    if into is None:
        return request.targets or TARGETS
    has = into.manifest.made.targets
    if request.targets is not None and set(request.targets) != set(has):
        raise UserError(f"{request.into}: has the targets {', '.join(has)}; leave --target out")
    return has


def _prompt_file(request: Request, folder: Path) -> Path | None:
    if not request.golden or not golden.reference_available():
        return None
    beside = folder / golden.PROMPT_FILE
    return request.golden_prompts or (beside if beside.is_file() else None)


def _output(request: Request, app: str) -> Path:
    """The bundle's folder; whether it may be replaced is for the command to say."""
    return request.into or request.output or Path("build") / app


def output_folder(request: Request) -> Path:
    """The folder that a request writes, before anything else of it is checked."""
    if request.into or request.output:
        return _output(request, "")
    return _output(request, load_adapter(find_adapter(request.adapters[0], _models(request))).app)


def _models(request: Request) -> Path:
    if request.models is not None:
        if not request.models.is_dir():
            raise UserError(f"{request.models}: no such folder of models")
        return request.models
    try:
        return models_folder()
    except UserError:
        # Paths for both need no folder of models.
        if request.base is not None and all(Path(name).is_dir() for name in request.adapters):
            return Path("models")
        raise


def _options(
    request: Request, adapter: Adapter, base: BaseFolder, package: PackageSettings
) -> CoreMLOptions:
    """The adapter's options: the bundle's settings and its own pruning."""
    longest, context = base.architecture.max_positions, package.context
    if context > longest:
        raise UserError(f"context {context} exceeds the {longest} positions of base '{base.identity.name}'")
    nodes, kept = package.num_nodes, _num_kept(request, package.num_nodes)
    if kept < nodes and not adapter.config.pruning_rank:
        raise UserError(f"adapter '{adapter.app}' has no pruning head, which pruning (--keep) needs")
    if nodes > context:
        raise UserError(f"--nodes {nodes} exceeds the context of {context} tokens")
    return CoreMLOptions(
        **{**package.options(), "chunk": min(package.chunk, context)},
        num_kept=kept,
        prune_over=request.prune_over or "draft",
    )


def _num_kept(request: Request, nodes: int) -> int:
    """Nodes left after pruning: what --keep says; all, or half of them with --prune-in-graph."""
    kept, prune = request.num_kept, request.prune_in_graph
    if kept is None:
        kept = max(1, nodes // 2) if prune else nodes
    if kept > nodes:
        raise UserError(f"--keep {kept} exceeds the {nodes} nodes of --nodes")
    if kept < nodes and prune is False:
        raise UserError("--no-prune-in-graph keeps every node; leave --keep out")
    if kept == nodes and prune:
        raise UserError(f"--prune-in-graph needs a --keep below the {nodes} nodes of --nodes")
    if kept == nodes and request.prune_over is not None:
        raise UserError("--prune-over is for early-exit pruning; add --keep")
    return kept


def _refuse_without_effect(request: Request, targets: tuple[str, ...]) -> None:
    """UserError naming an option that has no effect for these targets."""
    if request.device is not None and not request.golden:
        raise UserError("--device is for recording golden traces; it has no effect with --no-golden")
    if request.function_dtype is not None and "mlxfn" not in targets:
        raise UserError("--mlxfn-dtype is for --target mlxfn or all")
    if "coreml" in targets:
        return
    said = [name for name in COREML_ONLY if getattr(request.package, name) is not None]
    if said:
        flag = flag_of(said[0])
        raise UserError(
            f"{flag} is for Core ML packages; it has no effect with --target {'/'.join(targets)}"
        )
    if "mlxfn" not in targets and (request.num_kept or request.prune_in_graph):
        flag = "--keep" if request.num_kept else "--prune-in-graph"
        raise UserError(f"{flag} is for Core ML packages and exported MLX functions; add one to --target")


def _inputs_digest(request, planned, base, targets, into) -> str:
    """Digest of all inputs: base, adapter files, options, the converter's own code, library versions."""
    content = {
        "into": into and into.manifest.made.inputs,
        "base": base.identity.to_dict(),
        "adapters": [
            {
                "files": {f.name: sha256(f) for f in sorted(p.folder.iterdir()) if f.is_file()},
                "options": asdict(p.options),
                "prompts": [list(ids) for _, ids in p.prompts],
            }
            for p in planned
        ],
        "targets": sorted(targets),
        "function_dtype": (request.function_dtype or FUNCTION_DTYPES[0]) if "mlxfn" in targets else None,
        "golden": (request.golden, request.device),
        "versions": library_versions(),
        "code": _code_digest(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _code_digest() -> str:
    """A stage made by other code than this must not be reused."""
    import ss_convert
    import ss_device

    files = [
        file
        for package in (ss_device, ss_convert)
        for file in sorted(Path(package.__file__).parent.rglob("*.py"))
    ]
    return sha256(*files)


def library_versions() -> dict[str, str]:
    versions = {"ss-device": program_version()}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
