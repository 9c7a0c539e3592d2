"""What Apple's `LanguageBundle` reads of a folder, written from its source (`apple/coreai-models`).

`ModelBundle.swift`, `LanguageModelBundle.swift`, `LanguageConfig.swift`: the keys, which of them are
required, their types. Keys that it does not know are ignored there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

COMMON = {"kind": str, "name": str}
LANGUAGE = {"tokenizer": str, "vocab_size": int, "max_context_length": int}
STATES = ("kv_cache", "sliding_cache", "fixed")


@dataclass(frozen=True)
class LanguageBundle:
    """main: the asset; function: the one that engines run; tokenizer: its folder, None without one."""

    main: Path
    function: str
    vocab_size: int
    max_context_length: int
    tokenizer: Path | None
    user_data: dict[str, str]


def read_language_bundle(folder: Path) -> LanguageBundle:
    """ValueError for what the loader throws for."""
    from coreai.authoring import AIModelAsset

    if AIModelAsset.is_valid(folder):
        raise ValueError("is a model, not a model bundle directory")
    raw = json.loads((folder / "metadata.json").read_text())
    if raw.get("metadata_version", "0.1") != "0.2":
        raise ValueError("unsupported metadata_version")
    _expect(raw, COMMON)
    if raw["kind"] != "llm":
        raise ValueError("kind mismatch")
    assets, user_data = raw.get("assets", {}), raw.get("user_data", {})
    for table in (assets, user_data):
        _expect(table, dict.fromkeys(table, str))
    _expect(assets, {"main": str})
    for name in assets.values():
        if not AIModelAsset.is_valid(folder / name):
            raise ValueError(f"{name} is missing, or not a valid Core AI model")
    language = raw["language"]
    _expect(language, LANGUAGE)
    if not set(language.get("states", {}).values()) <= set(STATES):
        raise ValueError("unknown kind of state")
    embedded = language.get("embedded_tokenizer", True)
    tokenizer = folder / "tokenizer"
    return LanguageBundle(
        folder / assets["main"],
        language.get("function_map", {}).get("main", ["main"])[0],
        language["vocab_size"],
        language["max_context_length"],
        tokenizer if embedded and (tokenizer / "tokenizer.json").is_file() else None,
        user_data,
    )


def _expect(table: dict, types: dict[str, type]) -> None:
    for name, kind in types.items():
        if type(table.get(name)) is not kind:
            raise ValueError(f"'{name}' is not {kind.__name__}")
