"""Names that files were written with before: adapters, bundles and tunings are read by today's."""

from __future__ import annotations

from collections.abc import Mapping

CONFIG = {"markov_rank": "bigram_rank", "markov_shared": "bigram_shared"}
PARAMETERS = {"parent_bias": "bigram_bias", "shared_parent_bias": "shared_bigram_bias"}
BUNDLED = {"parent_bias_file": "bigram_bias_file"}
MADE = {"form": "package"}
EXPERIENCE = {"copies": "lookup"}
TENSORS = {"markov.u": "bigram.u", "markov.v": "bigram.v"}


def renamed(raw: object, names: Mapping[str, str]) -> object:
    """A mapping with keys of `names` under their new name; anything else as it is."""
    return {names.get(key, key): value for key, value in raw.items()} if isinstance(raw, dict) else raw


def adapter_entries(raw: dict) -> dict:
    """The entries of a speculative_config.json, of an adapter in a manifest, or of a measurement, under
    today's names."""
    raw = dict(renamed(raw, BUNDLED))
    for key, names in (("config", CONFIG), ("parameters", PARAMETERS)):
        if key in raw:
            raw[key] = renamed(raw[key], names)
    return raw


def manifest_entries(raw: dict) -> dict:
    """The entries of a bundle's manifest under today's names."""
    raw = dict(raw)
    if isinstance(adapters := raw.get("adapters"), dict):
        raw["adapters"] = {n: adapter_entries(a) if isinstance(a, dict) else a for n, a in adapters.items()}
    if "made" in raw:
        raw["made"] = renamed(raw["made"], MADE)
    return raw
