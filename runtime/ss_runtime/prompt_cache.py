"""Prompt caches of the Python interface: a text that goes on from one call to the next."""

from __future__ import annotations

from pathlib import Path

from ss_device.errors import UserError
from ss_runtime.loaded_model import SpeculativeModel


class PromptCache:
    """Keys and values of a text, for `stream_generate`.

    text: all its token ids, the latest ones included; computed: those with keys and values.

    Adapters whose keys and values are the same may share one: the lossless adapters of a base.
    """

    def __init__(self, model: SpeculativeModel) -> None:
        self.computed = model.new_text()
        self.text: list[int] = []

    def continued(self, ids: list[int], bos_id: int | None) -> list[int]:
        """The whole prompt: the text so far, then `ids`, whose BOS belongs to the beginning alone."""
        if self.text and bos_id is not None and ids[:1] == [bos_id]:
            ids = ids[1:]
        return [*self.text, *ids]

    def save(self, path: Path | str) -> None:
        """Write a safetensors file. Raises UserError for an empty cache or where it cannot be written."""
        self.computed.save(Path(path), pending=self.text[self.computed.reusable :])

    def load(self, path: Path | str, model: SpeculativeModel) -> None:
        """Take up a saved text. Raises UserError for a file of another model, or a damaged one."""
        limits = model.step_model.limits
        self.computed.load(Path(path), limits.context, limits.vocab_size)
        self.text = [*self.computed.tokens, *self.computed.pending]


def make_prompt_cache(model: SpeculativeModel) -> PromptCache:
    """An empty cache. The text of one conversation goes through one cache."""
    return PromptCache(model)


def save_prompt_cache(path: Path | str, cache: PromptCache) -> None:
    """Write a cache to a safetensors file; `load_prompt_cache` reads it, on this model."""
    cache.save(path)


def load_prompt_cache(path: Path | str, model: SpeculativeModel) -> PromptCache:
    """A saved cache. Raises UserError for a missing or damaged file, or one of another model."""
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file")
    cache = PromptCache(model)
    cache.load(path, model)
    return cache
