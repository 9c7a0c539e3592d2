"""What a conversion will do, checked before any heavy work: folders, identity, sizes, prompts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ss_convert import golden
from ss_device.adapter import Adapter, find_adapter, find_base, load_adapter
from ss_device.base_model import BaseFolder, models_folder, open_base
from ss_device.bundle import MANIFEST, CoreMLFunctions
from ss_device.command_line import program_version
from ss_device.errors import UserError
from ss_device.files import sha256

TARGETS = ("coreml", "mlx")
LIBRARIES = ("coremltools", "numpy", "safetensors", "torch", "transformers")


@dataclass(frozen=True)
class Request:
    """What the user asked for. Sizes in tokens; None takes the default that fits the base."""

    adapter: str
    base: Path | None = None
    models: Path | None = None
    output: Path | None = None
    targets: tuple[str, ...] = TARGETS
    num_nodes: int = 32
    num_kept: int | None = None
    context: int | None = None
    chunk: int | None = None
    prune_over: str = "draft"
    golden_prompts: Path | None = None
    golden: bool = True
    force: bool = False


@dataclass(frozen=True)
class Plan:
    """A checked request: everything that fits together, nothing heavy done yet.

    sizes: N, K, C and chunk under the file and function names they will have; prompts: text and token
    ids of the golden prompts; inputs: digest of all that determines the bundle.
    """

    adapter: Adapter
    adapter_folder: Path
    base: BaseFolder
    output: Path
    targets: tuple[str, ...]
    sizes: CoreMLFunctions
    prompts: tuple[tuple[str, tuple[int, ...]], ...]
    golden: bool
    inputs: str


def plan_conversion(request: Request) -> Plan:
    """Find adapter and base and check that they, the sizes and the output fit (UserError if not)."""
    folder = find_adapter(request.adapter, _models(request))
    adapter = load_adapter(folder)
    base = open_base(request.base or find_base(adapter, _models(request)))
    adapter.check_base(base)
    sizes = _sizes(request, adapter, base)
    file = _prompt_file(request, folder)
    return Plan(
        adapter=adapter,
        adapter_folder=folder,
        base=base,
        output=_output(request, adapter),
        targets=request.targets,
        sizes=sizes,
        prompts=golden.read_prompts(file, adapter, base, sizes.context) if file else (),
        golden=request.golden,
        inputs=_inputs_digest(request, folder, base, sizes, file),
    )


def _prompt_file(request: Request, folder: Path) -> Path | None:
    if not request.golden or not golden.reference_available():
        return None
    beside = folder / golden.PROMPT_FILE
    return request.golden_prompts or (beside if beside.is_file() else None)


def _output(request: Request, adapter: Adapter) -> Path:
    """The bundle's folder. A folder of the user's that is no bundle is never replaced."""
    output = request.output or Path("build") / adapter.app
    if output.exists() and not (output / MANIFEST).is_file() and _has_entries(output):
        raise UserError(f"{output}: exists and is not a bundle; choose another --output")
    return output


def _models(request: Request) -> Path:
    if request.models is not None:
        if not request.models.is_dir():
            raise UserError(f"{request.models}: no such folder of models")
        return request.models
    try:
        return models_folder()
    except UserError:
        # Paths for both need no folder of models.
        if request.base is not None and Path(request.adapter).is_dir():
            return Path("models")
        raise


def _has_entries(path: Path) -> bool:
    return not path.is_dir() or any(path.iterdir())


def _sizes(request: Request, adapter: Adapter, base: BaseFolder) -> CoreMLFunctions:
    longest = base.architecture.max_positions
    context = request.context or min(512, longest)
    if context > longest:
        raise UserError(f"context {context} exceeds the {longest} positions of base '{base.path.name}'")
    nodes, kept = request.num_nodes, request.num_kept or request.num_nodes
    if kept > nodes:
        raise UserError(f"--keep {kept} exceeds the {nodes} nodes of --nodes")
    if kept < nodes and not adapter.config.pruning_rank:
        raise UserError(f"adapter '{adapter.app}' has no pruning head, --keep needs one")
    if nodes > context:
        raise UserError(f"--nodes {nodes} exceeds the context of {context} tokens")
    app = adapter.app
    return CoreMLFunctions(
        package=f"coreml/{app}.mlpackage",
        prefill=f"{app}_prefill",
        step=f"{app}_step",
        chunk=min(request.chunk or 64, context),
        num_nodes=nodes,
        num_kept=kept,
        context=context,
        prune_over=request.prune_over,
    )


def _inputs_digest(request, folder, base, sizes, prompts) -> str:
    """Digest of all inputs: base, adapter files, options, the converter's own code, library versions."""
    content = {
        "base": base.identity.to_dict(),
        "adapter": {p.name: sha256(p) for p in sorted(folder.iterdir()) if p.is_file()},
        "sizes": asdict(sizes),
        "targets": sorted(request.targets),
        "golden": [request.golden, sha256(prompts) if prompts else None],
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
