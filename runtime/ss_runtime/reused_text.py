"""Texts whose keys and values a step model still holds: the next prompt that begins alike reuses them.

Keys and values belong to whatever they depend on: the base alone for a lossless adapter (so all lossless
adapters of a base share one text), the base and the adapter in shared mode. Where main streams attend to
streams (v2), only positions computed without streams are reused: others depend on what was generated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ss_device.bundle import Bundle, BundledAdapter
from ss_device.config import SpeculativeConfig
from ss_device.errors import UserError
from ss_device.step_model import Choose, Proposal, StepLimits, StepModel, Verified
from ss_device.tree import DraftTree
from ss_runtime.settings import RuntimeSettings


class KeysValues(Protocol):
    """Keys and values of one text. length: committed positions; available: the first of them that a
    prefill may keep; num_bytes: of the buffers, None where the back end does not tell."""

    length: int

    @property
    def available(self) -> int: ...

    @property
    def num_bytes(self) -> int | None: ...


class ReusableModel(StepModel, Protocol):
    """A step model whose `prefill` can keep the first `reuse` committed positions.

    cache: may be exchanged between two generations, also for that of another model with the same content.
    """

    config: SpeculativeConfig
    cache: KeysValues

    def prefill(self, tokens: Sequence[int], choose: Choose | None = None, reuse: int = 0) -> Proposal: ...


def cache_content(bundle: Bundle, adapter: BundledAdapter, settings: RuntimeSettings) -> str:
    """What keys and values depend on, as a sha256: base, dtype, bits, adapter in shared mode."""
    parts = [bundle.manifest.base.sha256, settings.dtype]
    parts += [f"quantized {settings.quantize}"] if settings.quantize else []
    parts += [f"keys and values {settings.kv_bits}"] if settings.kv_bits else []
    if adapter.config.mode == "shared":
        entry = bundle.manifest.files.get(adapter.tensor_file)
        parts += [
            entry.sha256 if entry else adapter.app,
            json.dumps(adapter.config.to_dict(), sort_keys=True),
        ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class ReusableText:
    """Committed tokens and their keys and values. `reusable`: how many of them a prompt may reuse."""

    def __init__(self, content: str, kv: KeysValues) -> None:
        self.content, self.kv = content, kv
        self.tokens: list[int] = []
        self.reusable = 0

    def trim(self, length: int) -> None:
        """Forget all but the first `length` tokens. Raises UserError when there are fewer."""
        if not 0 <= length <= len(self.tokens):
            raise UserError(f"a cache of {len(self.tokens)} tokens cannot be trimmed to {length}")
        del self.tokens[length:]
        self.kv.length = length
        self.reusable = min(self.reusable, length)

    def common(self, tokens: Sequence[int]) -> int:
        """How many tokens of the prompt need not be computed; its last one always is."""
        limit = min(self.reusable, self.kv.available, len(tokens) - 1)
        for index in range(limit):
            if self.tokens[index] != tokens[index]:
                return index
        return max(limit, 0)


class ReusingModel:
    """A step model whose prefill reuses the prefix shared with the previous text.

    text: may be shared by several models with the same content; one generation at a time. `reused`:
    prompt tokens that the last prefill did not compute.
    """

    def __init__(self, model: ReusableModel, text: ReusableText) -> None:
        self._model = model
        self.use(text)
        self._plain_only = model.config.main_attends_streams
        self._tree: DraftTree | None = None
        self.reused = 0

    def use(self, text: ReusableText) -> None:
        """Go on with another text of the same content."""
        self.text, self._model.cache = text, text.kv

    @property
    def limits(self) -> StepLimits:
        return self._model.limits

    def keep(self, num_kept: int) -> None:
        """As `MLXStepModel.keep`."""
        self._model.keep(num_kept)

    def prefill(self, tokens: Sequence[int], choose: Choose | None = None, **options) -> Proposal:
        """As `StepModel.prefill`, reusing the prefix shared with the text before. options: the model's."""
        text = self.text
        self.reused = text.common(tokens)
        text.trim(self.reused)
        proposal = self._model.prefill(tokens, choose, self.reused, **options)
        text.tokens[:] = [int(token) for token in tokens]
        text.reusable = len(tokens) - self._plain_only
        return proposal

    def step(self, tree: DraftTree, choose: Choose | None = None, **options) -> Verified:
        self._tree = tree
        return self._model.step(tree, choose, **options)

    def streams(self) -> np.ndarray:
        return self._model.streams()

    def commit(self, path: Sequence[int]) -> None:
        self._model.commit(path)
        self.text.tokens.extend(int(self._tree.tokens[node]) for node in path)
        if not self._plain_only:
            self.text.reusable = len(self.text.tokens)
