"""The settings of an adapter's streams by the name of a preset, as a JSON object, and with changes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ss_device.config import SpeculativeConfig, paper_config, plus_config
from ss_device.errors import UserError

PRESETS = {
    "paper": paper_config,
    "plus": plus_config,
    "shared": lambda: paper_config("shared"),
    "shared-v2": lambda: paper_config("shared", main_attends_streams=True),
}
BARE_WORDS = ("lossless", "shared", "adapter", "base", "shift", "same")
"""Values that need no quotation marks."""


def speculative_config(
    settings: str | Mapping | SpeculativeConfig, changes: Mapping | None = None
) -> SpeculativeConfig:
    """Settings by a preset's name, as a JSON object (text or mapping) or as they are, then changed.

    Raises UserError that names the preset or the setting that is wrong.
    """
    if isinstance(settings, SpeculativeConfig):
        raw = settings.to_dict()
    elif isinstance(settings, Mapping):
        raw = dict(settings)
    elif isinstance(settings, str):
        raw = PRESETS[settings]().to_dict() if settings in PRESETS else _object(settings)
    else:
        kind = type(settings).__name__
        raise UserError(
            f"settings are {kind}, expected one of {', '.join(PRESETS)} or an object of settings"
        )
    return SpeculativeConfig.from_dict({**raw, **(changes or {})})


def changes_of(words: Sequence[str]) -> dict:
    """`NAME=VALUE` words as settings; UserError for another word, and for a value that is no JSON."""
    changes = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator:
            raise UserError(f"--set {word}: expected NAME=VALUE, as num_msa_layers=6")
        message = f"--set {word}: '{value}' is no value"
        changes[name] = value if value in BARE_WORDS else _decoded(value, message)
    return changes


def _object(text: str) -> dict:
    raw = _decoded(text, f"settings '{text}' are neither {', '.join(PRESETS)} nor a JSON object")
    if not isinstance(raw, dict):
        raise UserError(f"settings '{text}' are not a JSON object")
    return raw


def _decoded(text: str, message: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{message} ({error.msg})") from error
