"""What a conversion reads: adapters, their base, and the bundle that they are added to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ss_convert.settings import ConversionSettings
from ss_device.adapter import Adapter, find_adapter, find_base, load_adapter
from ss_device.base_model import BaseFolder, models_folder, open_base
from ss_device.bundle import Bundle, open_bundle
from ss_device.errors import UserError


@dataclass(frozen=True)
class Inputs:
    """Adapters, the folder of each, their base; into: the bundle to extend, None for a new one."""

    adapters: tuple[Adapter, ...]
    folders: tuple[Path, ...]
    base: BaseFolder
    into: Bundle | None


def read_inputs(settings: ConversionSettings) -> Inputs:
    """Find and open what the settings name. UserError where adapters, base and bundle do not fit."""
    folders = _adapter_folders(settings)
    adapters = tuple(load_adapter(folder) for folder in folders)
    base = open_base(settings.base or find_base(adapters[0], _models(settings)))
    for adapter in adapters:
        adapter.check_base(base)
    into = None if settings.into is None else _open_into(settings.into, base, settings.preset)
    return Inputs(adapters, folders, base, into)


def output_folder(settings: ConversionSettings) -> Path:
    """The folder that is written, told before anything else is read; whether it may be, others must say."""
    if folder := settings.into or settings.output:
        return folder
    return default_output(load_adapter(_adapter_folders(settings)[0]))


def default_output(first: Adapter) -> Path:
    """Where the bundle of these adapters goes if nobody says it."""
    return Path("build") / first.app


def _adapter_folders(settings: ConversionSettings) -> tuple[Path, ...]:
    if not settings.adapters:
        raise UserError("name at least one adapter")
    models = _models(settings)
    return tuple(find_adapter(name, models) for name in settings.adapters)


def _models(settings: ConversionSettings) -> Path:
    if settings.models is not None:
        if not settings.models.is_dir():
            raise UserError(f"{settings.models}: no such folder of models")
        return settings.models
    try:
        return models_folder()
    except UserError:
        # Paths for both need no folder of models.
        if settings.base is not None and all(Path(name).is_dir() for name in settings.adapters):
            return Path("models")
        raise


def _open_into(path: Path, base: BaseFolder, preset: str | None) -> Bundle:
    """The bundle to extend, whole and made from this very base."""
    if preset is not None:
        raise UserError(f"{path}: its packages are there already; leave --preset out")
    bundle = open_bundle(path, verify=True)
    theirs, ours = bundle.manifest.base, base.identity
    for what, old, new in (
        ("base", theirs.sha256, ours.sha256),
        ("tokenizer", theirs.tokenizer_sha256, ours.tokenizer_sha256),
    ):
        if old != new:
            raise UserError(
                f"{path}: was made from {what} '{theirs.name}' (sha256 {old[:12]}…), this "
                f"{what} is '{ours.name}' (sha256 {new[:12]}…); convert all adapters again"
            )
    return bundle
