"""Bundles: the manifest that everything on the device reads (ARCHITECTURE.md)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from ss_device.application import fill_template
from ss_device.architecture import Architecture
from ss_device.base_model import BaseIdentity
from ss_device.config import PRUNE_OVER, SpeculativeConfig
from ss_device.errors import UserError
from ss_device.files import read_tensors, sha256
from ss_device.names import check_base_name, check_name, inside
from ss_device.old_names import TENSORS, manifest_entries, renamed
from ss_device.outputs import recover_folder
from ss_device.strict_json import read_json, typed
from ss_device.tree import BigramBias

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
TUNING = "tuning.json"  # written beside it by `ss-bench tune`
BIGRAM_BIAS = ("bigram.u", "bigram.v")
# Where things are in a bundle. Readers follow the manifest's entries; these are the converter's choices.
MLX_BASE = "mlx/base.safetensors"
PACKAGES = "coreml"
ASSETS = "coreai"
GOLDEN = "golden"


def tensor_file(app: str) -> str:
    """An adapter's tensors."""
    return f"mlx/adapters/{app}.safetensors"


def bigram_bias_file(digest: str) -> str:
    """A bigram bias that adapters share; digest: of its content, so equal ones are one file."""
    return f"mlx/bigram_bias/{digest}.safetensors"


def exported_functions_file(app: str) -> str:
    """An adapter's exported MLX functions."""
    return f"mlxfn/{app}.mlxfn"


def package_path(name: str) -> str:
    """A Core ML package, `name` with its suffix."""
    return f"{PACKAGES}/{name}"


def asset_path(name: str) -> str:
    """A Core AI asset, `name` with its suffix."""
    return f"{ASSETS}/{name}"


def golden_stem(app: str, *, stored: bool = False) -> str:
    """An adapter's golden traces, without suffix; stored: those with the weights of the package."""
    return f"{GOLDEN}/stored/{app}" if stored else f"{GOLDEN}/{app}"


@dataclass(frozen=True)
class PartLink:
    """How a part of a divided model is fed: layers (first, behind the last); for `prefill` and `step`
    input → its source.

    A source is the name of an input of the whole function (what the host feeds) or of an output of the
    part before.
    """

    layers: tuple[int, int]
    prefill: dict[str, str]
    step: dict[str, str]


@dataclass(frozen=True)
class StepFunctions:
    """Where an adapter's functions are, in Core ML packages or Core AI assets, and their sizes.

    package: path of package or asset inside the bundle; prefill, step: function names; chunk: prompt tokens
    per prefill call; num_nodes N, num_kept K, context C in tokens; prune_over: `draft` or `vocabulary`, how
    early-exit scores are normalised (unused when K = N).

    weights, embedding_weights: how base weights are stored (`fp16 int8 int4 lut4 lut6`); graph: the
    other choices of the graph by option name; sampling: the step also returns `logits` [K, V]
    and `stream_logits` of all kept nodes [K, γ, V];
    parts: packages in the order in which they run, `package` being the first, () for one package;
    chain: how each of them is fed, its functions having the same names in every part;
    lora: `baked` (constants of the adapter's functions) or `inputs`: functions that adapters share, to
    which the host passes the adapter's tensors, LoRA padded to lora_rank (`adapter_inputs.py`);
    golden: traces of the reference with the weights as the package stores them, where they differ from
    the base's.
    """

    package: str
    prefill: str
    step: str
    chunk: int
    num_nodes: int
    num_kept: int
    context: int
    prune_over: str = "draft"
    weights: str = "fp16"
    embedding_weights: str = "fp16"
    sampling: bool = False
    graph: dict = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    chain: tuple[PartLink, ...] = ()
    golden: str | None = None
    lora: str = "baked"
    lora_rank: int = 0

    @property
    def packages(self) -> tuple[str, ...]:
        """Paths of the packages inside the bundle, in the order in which they run."""
        return self.parts or (self.package,)


@dataclass(frozen=True)
class MLXFunctions:
    """An adapter's exported MLX functions and the sizes they were traced for.

    file: path inside the bundle; dtype: of weights, keys and values; chunk: tokens per prefill call;
    num_nodes N, num_kept K, context in tokens; slots of the key/value buffers; prune_over as in
    `StepFunctions`.
    """

    file: str
    dtype: str
    chunk: int
    num_nodes: int
    num_kept: int
    context: int
    slots: int
    prune_over: str = "draft"


@dataclass(frozen=True)
class BundledAdapter:
    """One application of a bundle. tensor_file: where its tensors are.

    bigram_bias_file: where the factors of a bigram bias are that adapters share; None: in tensor_file.
    """

    app: str
    config: SpeculativeConfig
    prompt_template: str
    stop_strings: tuple[str, ...]
    max_tokens: int
    num_nodes: int
    tensor_file: str
    parameters: dict[str, int] = field(default_factory=dict)
    rank_statistics: dict = field(default_factory=dict)
    coreml: StepFunctions | None = None
    coreai: StepFunctions | None = None
    golden: str | None = None
    bigram_bias_file: str | None = None
    mlxfn: MLXFunctions | None = None

    def prompt(self, row: dict) -> str:
        """Prompt text of a row: its `prompt` field as is, else the application's template filled."""
        return row["prompt"] if "prompt" in row else fill_template(self.prompt_template, row, self.app)


@dataclass(frozen=True)
class BundledFile:
    """Size and digest of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Made:
    """How a bundle came about.

    inputs: digest of all that determines it; versions by library; package: the packages' settings
    (`ss_convert.settings`); exact_weights: 16 bits hold all weights; package_bytes by package.
    """

    inputs: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    targets: tuple[str, ...] = ()
    package: dict = field(default_factory=dict)
    exact_weights: bool = True
    package_bytes: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """Everything a bundle says of itself. files: by path inside it."""

    architecture: Architecture
    base: BaseIdentity
    adapters: dict[str, BundledAdapter]
    files: dict[str, BundledFile] = field(default_factory=dict)
    made: Made = field(default_factory=Made)


@dataclass(frozen=True)
class Bundle:
    """An opened bundle folder. stamp: digest of the manifest as it was read; empty where none was."""

    path: Path
    manifest: Manifest
    stamp: str = ""

    def check_unchanged(self) -> None:
        """To be called when files of the bundle were read: all of them must be of one bundle.

        Raises UserError when another one took its place since it was opened.
        """
        file = self.path / MANIFEST
        if self.stamp and (not file.is_file() or sha256(file) != self.stamp):
            raise UserError(f"{self.path}: was replaced while it was being read; run this again")

    def adapter(self, name: str | None = None) -> BundledAdapter:
        """The named adapter, or the only one. UserError lists the adapters of the bundle."""
        known = self.manifest.adapters
        if name is None and len(known) == 1:
            return next(iter(known.values()))
        if name is None:
            raise UserError(f"{self.path}: name one of its adapters: {', '.join(sorted(known))}")
        if name not in known:
            raise UserError(
                f"{self.path}: no adapter '{name}' in this bundle (found: "
                f"{', '.join(sorted(known)) or 'none'})"
            )
        return known[name]

    def weights_digest(self, adapter: BundledAdapter) -> str:
        """What stands for the weights of base and adapter: sha256 of their files' sha256, one per line.

        An empty line for a file that the bundle does not have.
        """
        files = self.manifest.files
        names = filter(None, (MLX_BASE, adapter.tensor_file, adapter.bigram_bias_file))
        lines = [files[name].sha256 if name in files else "" for name in names]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def bigram_bias(self, adapter: BundledAdapter) -> BigramBias | None:
        """The adapter's bigram term in float32, None without one. UserError for a damaged file."""
        tensors = self.bigram_bias_tensors(adapter)
        return BigramBias(*(t.astype(np.float32) for t in tensors.values())) if tensors else None

    def bigram_bias_tensors(self, adapter: BundledAdapter) -> dict[str, np.ndarray]:
        """`bigram.u` and `bigram.v` [V, rank] as stored, {} without a bigram bias."""
        if not adapter.config.bigram_rank:
            return {}
        file = self.path / (adapter.bigram_bias_file or adapter.tensor_file)
        tensors, shape = (
            renamed(read_tensors(file), TENSORS),
            (self.manifest.architecture.vocab_size, adapter.config.bigram_rank),
        )
        for name in BIGRAM_BIAS:
            if name not in tensors or tensors[name].shape != shape:
                raise UserError(
                    f"{file}: the bigram bias of '{adapter.app}' lacks '{name}' of shape {shape}"
                )
        return {name: tensors[name] for name in BIGRAM_BIAS}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json` with size and digest of every other file of `folder`."""
    files = {
        p.relative_to(folder).as_posix(): {"bytes": p.stat().st_size, "sha256": sha256(p)}
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != MANIFEST
    }
    raw = {"format_version": FORMAT_VERSION, **asdict(manifest), "files": files}
    (folder / MANIFEST).write_text(json.dumps(raw, indent=1) + "\n")


def open_bundle(path: Path | str, verify: bool = False) -> Bundle:
    """Read a bundle's manifest; files must be there with their sizes, `verify` checks digests too.

    Raises UserError for a folder without manifest, another format version, a missing, truncated or
    changed file.
    """
    path = Path(path)
    if not path.exists():
        recover_folder(path)
    if not (path / MANIFEST).is_file():
        raise UserError(f"{path}: not a bundle (no {MANIFEST}); make one with ss-convert")
    stamp = sha256(path / MANIFEST)
    raw = read_json(path / MANIFEST)
    version = raw.get("format_version")
    if version != FORMAT_VERSION:
        newer = isinstance(version, int) and version > FORMAT_VERSION
        raise UserError(
            f"{path / MANIFEST}: bundle format version {version!r:.40}, this program reads "
            f"{FORMAT_VERSION}" + ("; update ss-device" if newer else "")
        )
    del raw["format_version"]
    manifest = typed(Manifest, manifest_entries(raw), str(path / MANIFEST))
    _check_adapters(path, manifest)
    _check_files(path, manifest.files, verify)
    if (path / TUNING).is_symlink():  # what is written there would go where it leads
        raise UserError(f"{path / TUNING}: is a symbolic link, expected a plain file")
    bundle = Bundle(path, manifest, stamp)
    bundle.check_unchanged()
    return bundle


def step_functions(raw: dict) -> StepFunctions:
    """StepFunctions from their JSON form."""
    return typed(StepFunctions, raw, "functions")


def is_bundle(folder: Path) -> bool:
    """Whether a folder holds a bundle, whole or damaged, and nothing that is not of it."""
    try:
        files = read_json(folder / MANIFEST)["files"]
        known = {MANIFEST, TUNING, *files}
    except (UserError, KeyError, TypeError):
        return False
    return all(
        path.relative_to(folder).as_posix() in known
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    )


def inputs_of(folder: Path) -> str | None:
    """Digest of all that a bundle was made from, also of a damaged one; None where no manifest says it."""
    try:
        return read_json(folder / MANIFEST)["made"]["inputs"]
    except (UserError, KeyError, TypeError):
        return None


def _check_adapters(path: Path, manifest: Manifest) -> None:
    """Names that become parts of paths, and paths, which must stay in the bundle."""
    where = str(path / MANIFEST)
    check_base_name(manifest.base.name, f"{where}: base")
    for name, entry in manifest.adapters.items():
        check_name(name, f"{where}: adapter")
        if entry.app != name:
            raise UserError(f"{where}: adapter '{name}' is called {entry.app!r:.120} in its entry")
        for file in filter(None, _paths(entry)):
            inside(path, file, f"{where}: adapter '{name}'")
        _check_sizes(entry, f"{where}: adapter '{name}'")


def _check_sizes(entry: BundledAdapter, where: str) -> None:
    """Every count at least 1; kept nodes at most those of a tree, which functions and context hold."""
    counts = {"max_tokens": entry.max_tokens, "num_nodes": entry.num_nodes}
    for functions in filter(None, (entry.coreml, entry.coreai, entry.mlxfn)):
        counts["chunk"] = functions.chunk
        sizes = (functions.num_kept, functions.num_nodes, functions.context)
        if not 1 <= sizes[0] <= sizes[1] <= sizes[2]:
            raise UserError(
                f"{where}: {sizes[0]} kept of {sizes[1]} nodes in a context of {sizes[2]} tokens"
            )
        if entry.num_nodes > functions.num_nodes:
            raise UserError(
                f"{where}: {entry.num_nodes} nodes, its functions take at most {functions.num_nodes}"
            )
        if functions.prune_over not in PRUNE_OVER:
            raise UserError(
                f"{where}: prune_over {functions.prune_over!r:.40} is not {' or '.join(PRUNE_OVER)}"
            )
    for name, count in counts.items():
        if count < 1:
            raise UserError(f"{where}: {name} {count} must be at least 1")


def _paths(entry: BundledAdapter) -> tuple[str | None, ...]:
    graphs = [
        path
        for functions in filter(None, (entry.coreml, entry.coreai))
        for path in (*functions.packages, functions.golden)
    ]
    exported = (entry.mlxfn.file,) if entry.mlxfn else ()
    return (entry.tensor_file, entry.bigram_bias_file, entry.golden, *graphs, *exported)


def _check_files(path: Path, files: dict[str, BundledFile], verify: bool) -> None:
    for name, entry in files.items():
        file = inside(path, name, str(path / MANIFEST))
        if not file.is_file():
            raise UserError(f"{path}: file '{name}' of the bundle is missing")
        if file.is_symlink():
            raise UserError(
                f"{path}: file '{name}' of the bundle is a symbolic link, expected a plain file"
            )
        if file.stat().st_size != entry.bytes:
            raise UserError(
                f"{path}: file '{name}' has {file.stat().st_size} bytes, expected {entry.bytes}"
            )
        if verify and sha256(file) != entry.sha256:
            raise UserError(f"{path}: file '{name}' was changed after the conversion (sha256)")
