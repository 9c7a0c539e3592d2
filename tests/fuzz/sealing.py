"""Digests made to agree with a damaged file, so that its reader has to notice what is wrong."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

BUNDLES = ("bundle", "packed")
BASES = {
    "models/base/tiny-base": ("tiny", "second", "shared"),
    "models/base/sharded-base": ("sharded",),
}


def seal(work: Path, path: str) -> bool:
    """Write the digests of a damaged file where it is listed; whether it is."""
    try:
        bundle, _, name = path.partition("/")
        if bundle in BUNDLES:
            return _seal_bundle(work / bundle, name)
        for base, adapters in BASES.items():
            if path.startswith(base + "/"):
                return _seal_base(work, base, adapters, Path(path).name)
    except OSError:
        pass
    return False


def _seal_bundle(bundle: Path, name: str) -> bool:
    manifest = bundle / "manifest.json"
    if name == manifest.name:
        return False
    raw = json.loads(manifest.read_text())
    if name not in raw["files"]:
        return False
    data = (bundle / name).read_bytes() if (bundle / name).is_file() else b""
    raw["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    _rewrite(manifest, raw)
    return True


def _seal_base(work: Path, base: str, adapters: tuple[str, ...], name: str) -> bool:
    if name != "tokenizer.json" and not name.endswith(".safetensors"):
        return False
    files = sorted((work / base).glob("model*.safetensors"))
    if not all(f.is_file() for f in [*files, work / base / "tokenizer.json"]):
        return False
    weights = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    tokenizer = hashlib.sha256((work / base / "tokenizer.json").read_bytes()).hexdigest()
    for adapter in adapters:
        config = work / "models" / "adapters" / adapter / "speculative_config.json"
        raw = json.loads(config.read_text())
        raw["base"] |= {"sha256": weights, "tokenizer_sha256": tokenizer}
        _rewrite(config, raw)
    return True


def _rewrite(path: Path, raw: dict) -> None:
    """As a new file: the sandbox tells changes by inode and time."""
    path.unlink()
    path.write_text(json.dumps(raw, indent=1) + "\n")
