"""A package that is the same, byte for byte, whenever it is made from the same inputs.

coremltools writes a package with random identifiers, and protocol buffers write their maps in another order
in every process. Both mean nothing: identifiers link the entries of one package to each other.
"""

from __future__ import annotations

import json
from pathlib import Path
from uuid import NAMESPACE_URL, UUID, uuid5

from coremltools.proto import Model_pb2

from ss_device.checked_writing import checked_file
from ss_device.files import sha256

MANIFEST, ITEMS, ROOT = "Manifest.json", "itemInfoEntries", "rootModelIdentifier"


def write_specification(spec: Model_pb2.Model, package: Path) -> None:
    """Replace the specification of a saved package by `spec`, its maps in the order of their keys, and the
    random identifiers by ones that follow from paths and contents."""
    raw = json.loads((package / MANIFEST).read_text(encoding="utf-8"))
    items = raw[ITEMS]
    model = package / "Data" / items[raw[ROOT]]["path"]
    with checked_file(model) as file:
        file.write(spec.SerializeToString(deterministic=True))
    names = {old: str(_identifier(package, entry["path"])) for old, entry in items.items()}
    raw[ITEMS] = {names[old]: entry for old, entry in items.items()}
    raw[ROOT] = names[raw[ROOT]]
    (package / MANIFEST).write_text(json.dumps(raw, indent=4, sort_keys=True) + "\n", encoding="utf-8")


def _identifier(package: Path, path: str) -> UUID:
    """Of an item of the package, a file or a folder of files: from its path and its bytes."""
    item = package / "Data" / path
    files = sorted(p for p in item.rglob("*") if p.is_file()) if item.is_dir() else [item]
    names = [str(file.relative_to(package)) for file in files]
    return uuid5(NAMESPACE_URL, json.dumps([path, names, sha256(*files)]))
