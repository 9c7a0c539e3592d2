"""The audit of a bundle or a package: facts, hazards, costs and an estimate, for people and programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ss_convert.audit.costs import Costs, blob_bytes, bytes_by_kind, costs
from ss_convert.audit.devices import Device
from ss_convert.audit.rules import Hazard, hazards
from ss_convert.audit.view import View, bytes_of, view
from ss_device.bundle import MANIFEST, open_bundle
from ss_device.errors import UserError, one_line
from ss_executor import ExecutorError, load_package


@dataclass(frozen=True)
class FunctionAudit:
    """One function: its operations, what a call costs, how long it would take on the device."""

    name: str
    operations: dict[str, int]
    costs: Costs
    seconds: dict[str, float]
    constant_bytes: int

    def to_dict(self) -> dict:
        return {
            "operations": self.operations,
            **asdict(self.costs),
            "intensity": round(self.costs.intensity, 2),
            "seconds": self.seconds,
            "constant_bytes": self.constant_bytes,
        }


@dataclass(frozen=True)
class PackageAudit:
    """One package. own_bytes: bytes of the weight file that belong to one adapter alone; shared_bytes: the
    base, tables and what several adapters read."""

    path: str
    weight_bytes: int
    state_bytes: int
    kinds: dict[str, int]
    own_bytes: dict[str, int]
    shared_bytes: int
    functions: list[FunctionAudit]
    hazards: list[Hazard]
    placement: dict = field(default_factory=dict)

    def to_dict(self) -> dict:
        return {
            "package": self.path,
            "weight_bytes": self.weight_bytes,
            "state_bytes": self.state_bytes,
            "bytes_by_kind": self.kinds,
            "bytes_by_adapter": self.own_bytes,
            "shared_bytes": self.shared_bytes,
            "functions": {function.name: function.to_dict() for function in self.functions},
            "hazards": [hazard.to_dict() for hazard in self.hazards],
            "placement": self.placement,
        }


@dataclass(frozen=True)
class Audit:
    """Everything the command says. device: the figures the estimates rest on."""

    source: str
    engine: str
    device: Device
    packages: list[PackageAudit]

    def to_dict(self) -> dict:
        return {
            "source": self.source,
            "engine": self.engine,
            "device": asdict(self.device),
            "packages": [package.to_dict() for package in self.packages],
            "num_hazards": sum(len(package.hazards) for package in self.packages),
        }


def audit(source: Path, engine: str, device: Device) -> Audit:
    """Audit a bundle's Core ML packages, or any `.mlpackage`.

    Raises UserError for what is neither and for a damaged package.
    """
    owners = _owners(source)
    try:
        packages = [_package(source, path, apps, engine, device) for path, apps in owners.items()]
    except ExecutorError as error:
        raise UserError(one_line(error)) from error
    return Audit(str(source), engine, device, packages)


def package_sizes(paths: Sequence[Path], apps: dict[str, str]) -> dict:
    """Bytes of the packages' weight files: all, by kind, base and tables, each adapter's own.

    paths: the package, or those of all parts, whose files are also told one by one; apps: function
    name → application.
    """
    kinds, own = Counter(), Counter()
    shared, files = 0, []
    for path in paths:
        package = load_package(path)
        views = [view(function) for function in package.functions.values()]
        part_own, part_shared = _shares(views, apps)
        kinds.update(bytes_by_kind(views))
        own.update(part_own)
        shared += part_shared
        files.append(package.weight_bytes)
    sizes = {"weight_bytes": sum(files), "by_kind": dict(kinds.most_common()), "shared": shared}
    return sizes | {"own": dict(sorted(own.items()))} | ({"parts": files} if len(files) > 1 else {})


def _owners(source: Path) -> dict[Path, dict[str, str]]:
    """Package → function name → application."""
    if source.suffix == ".mlpackage":
        return {source: {}}
    if not (source / MANIFEST).is_file():
        raise UserError(f"{source}: neither a bundle (no {MANIFEST}) nor a .mlpackage")
    owners: dict[Path, dict[str, str]] = {}
    for app, entry in open_bundle(source).manifest.adapters.items():
        for package in () if entry.coreml is None else entry.coreml.packages:
            apps = owners.setdefault(source / package, {})
            for name in (entry.coreml.prefill, entry.coreml.step):
                apps[name] = f"{apps[name]}, {app}" if name in apps else app
    if not owners:
        raise UserError(f"{source}: has no Core ML package (ss-convert --target coreml)")
    return owners


def _package(source: Path, path: Path, apps: dict, engine: str, device: Device) -> PackageAudit:
    package = load_package(path)
    views = [view(function) for function in package.functions.values()]
    own, shared = _shares(views, apps or _apps_of(package.metadata))
    states = {name: s for v in views for name, s in v.function.states.items()}
    return PackageAudit(
        path=str(path.relative_to(source)) if path != source else path.name,
        weight_bytes=package.weight_bytes,
        state_bytes=sum(bytes_of(s) for s in states.values()),
        kinds=bytes_by_kind(views),
        own_bytes=own,
        shared_bytes=shared,
        functions=[_function(v, device) for v in views],
        hazards=hazards(views, engine, package.weight_bytes),
    )


def _function(seen: View, device: Device) -> FunctionAudit:
    found = costs(seen)
    histogram = {name: count for name, count in seen.function.op_histogram().items() if name != "const"}
    constants = sum(bytes_of(piece.type) for c in seen.constants() for piece in c.pieces)
    return FunctionAudit(seen.function.name, histogram, found, found.seconds(device), constants)


def _shares(views: list[View], apps: dict[str, str]) -> tuple[dict[str, int], int]:
    """Bytes of the weight file that belong to one adapter, and all others.

    An adapter's own: its tensors by their names, unless another adapter has the same; where there are
    several adapters also tables that only its functions read. Functions that belong to no adapter count
    as one each.
    """
    readers: dict[tuple, set[str]] = {}
    sizes: dict[tuple, tuple[int, bool]] = {}
    for seen in views:
        blobs = blob_bytes(seen)
        sizes |= blobs
        for key in blobs:
            readers.setdefault(key, set()).add(apps.get(seen.function.name, seen.function.name))
    own: dict[str, int] = dict.fromkeys(sorted({a for names in readers.values() for a in names}), 0)
    for key, names in readers.items():
        count, of_adapter = sizes[key]
        if len(names) == 1 and (of_adapter or len(own) > 1):
            own[next(iter(names))] += count
    return own, sum(count for count, _ in sizes.values()) - sum(own.values())


def _apps_of(metadata: dict[str, str]) -> dict[str, str]:
    """Function name → application by what a package of ss-convert says of itself; {} for others."""
    apps: dict[str, str] = {}
    for key, text in metadata.items():
        if key.startswith("adapter."):
            entry, app = json.loads(text), key.removeprefix("adapter.")
            for name in (entry["prefill"], entry["step"]):
                apps[name] = f"{apps[name]}, {app}" if name in apps else app
    return apps
