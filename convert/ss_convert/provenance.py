"""What a bundle was made from: one digest of all that determines it, and the versions of libraries."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ss_device.command_line import program_version
from ss_device.files import sha256

LIBRARIES = ("coremltools", "numpy", "safetensors", "torch", "transformers")


def inputs_digest(content: dict) -> str:
    """sha256 of a conversion's inputs (JSON), the converter's own code and the libraries it runs with."""
    whole = {**content, "versions": library_versions(), "code": _code_digest()}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def folder_digests(folder: Path) -> dict[str, str]:
    """sha256 of every file of a folder, by name."""
    return {file.name: sha256(file) for file in sorted(folder.iterdir()) if file.is_file()}


def library_versions() -> dict[str, str]:
    """Versions of ss-device and of the libraries that are installed."""
    versions = {"ss-device": program_version()}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


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
