"""Prompt caches: keys and values of a text, reused by the next prompt that begins with it.

A cache belongs to whatever its keys and values depend on: the base alone for a lossless adapter (so all
lossless adapters of a base share one), the base and the adapter in shared mode. Where main streams attend
to streams (v2), only positions computed without streams are reused: others depend on what was generated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from ss_device.bundle import Bundle, BundledAdapter
from ss_device.errors import UserError, one_line
from ss_device.outputs import file_in_one_go
from ss_device.step_model import Choose, Proposal, StepLimits, Verified
from ss_device.token_ids import check_token_ids
from ss_device.tree import DraftTree
from ss_runtime.mlx.kv_cache import KVCache, write_rows
from ss_runtime.mlx.step_model import MLXStepModel
from ss_runtime.settings import RuntimeSettings

FORMAT_VERSION = 1
NAMES = {"keys", "values", "tokens"}  # that every such file has


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


class CachedText:
    """Committed tokens and their keys and values. `reusable`: how many of them a prompt may reuse."""

    def __init__(self, content: str, kv: KVCache) -> None:
        self.content, self.kv = content, kv
        self.tokens: list[int] = []
        self.pending: list[int] = []  # of a loaded text: its last tokens, not computed yet
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
        if not self.kv.layers:  # an interrupted step took the buffers along
            return 0
        limit = min(self.reusable, len(tokens) - 1)
        for index in range(limit):
            if self.tokens[index] != tokens[index]:
                return index
        return max(limit, 0)

    def save(self, path: Path, messages: Sequence[dict] = (), pending: Sequence[int] = ()) -> None:
        """Write a safetensors file: tokens, and the cache's arrays (`KVCache.stacked`).

        messages: a conversation whose text this is, pending: tokens of the text that were not computed
        yet; both are kept for `load`.
        """
        length = self.reusable
        if not length or not self.kv.layers:
            raise UserError("the prompt cache is empty: generate or prefill before saving it")
        arrays = {
            name: mx.stack([buffers[part][0, :, :length] for buffers in self.kv.layers])
            for part, name in enumerate(self.kv.names)
        }
        arrays["tokens"] = mx.array(self.tokens[:length], mx.int32)
        about = {
            "format_version": str(FORMAT_VERSION),
            "content": self.content,
            "kv_bits": str(self.kv.bits or ""),
            "messages": json.dumps(list(messages), ensure_ascii=False),
            "pending": json.dumps([int(token) for token in pending]),
        }
        try:
            with file_in_one_go(path) as partial:
                mx.save_safetensors(str(partial), arrays, about)
        except (RuntimeError, OSError) as error:
            raise UserError(f"{path}: cannot be written ({one_line(error)})") from error

    def load(self, path: Path, context: int, vocab_size: int | None = None) -> list[dict]:
        """Replace the text by a saved one. → the messages saved with it.

        Raises UserError for a cache of another base, dtype or adapter, for a damaged file and for a
        token that a model of `vocab_size` tokens does not have; the text is then what it was.
        """
        arrays, about = _read(path)
        self._check(path, arrays, about, context)
        if vocab_size is not None:
            check_token_ids(arrays["tokens"].tolist(), vocab_size, f"{path}: its text")
        tokens, kv, messages = arrays["tokens"].tolist(), self.kv, _messages(path, about)
        pending = _pending(path, about, vocab_size)
        kv.reset()
        kv.reserve(len(tokens))
        start = mx.array([0])
        kv.layers = [
            tuple(
                write_rows(buffer, arrays[name][layer][None], start)
                for buffer, name in zip(buffers, kv.names, strict=True)
            )
            for layer, buffers in enumerate(kv.layers)
        ]
        mx.eval(kv.layers)
        kv.length = len(tokens)
        self.tokens, self.pending, self.reusable = tokens, pending, len(tokens)
        return messages

    def _check(self, path: Path, arrays: dict, about: dict[str, str], context: int) -> None:
        """Raise UserError for a file that is not this text's or does not fit."""
        kv = self.kv
        if about.get("format_version") != str(FORMAT_VERSION) or not set(arrays) >= NAMES:
            raise UserError(f"{path}: not a prompt cache of format version {FORMAT_VERSION}")
        if (bits := about.get("kv_bits", "")) != str(kv.bits or ""):
            theirs, ours = (f"in {b} bits" if b else "not quantized" for b in (bits, kv.bits))
            raise UserError(f"{path}: its keys and values are {theirs}, here they are {ours} (--kv-bits)")
        if about.get("content") != self.content:
            raise UserError(
                f"{path}: made with another base, dtype or adapter (content "
                f"{about.get('content', '')[:12]}…, here {self.content[:12]}…)"
            )
        tokens = arrays["tokens"]
        if tokens.ndim != 1 or tokens.dtype != mx.int32:
            found = f"{tokens.dtype} {tokens.shape}"
            raise UserError(f"{path}: 'tokens' is {found}, expected {mx.int32} in one dimension")
        length = tokens.size
        if length > context:
            raise UserError(f"{path}: {length} tokens, the context holds {context}")
        for name, (shape, dtype) in kv.stacked(length).items():
            array = arrays.get(name)
            if array is None or array.shape != shape or array.dtype != dtype:
                found = f"{array.dtype} {array.shape}" if array is not None else "missing"
                raise UserError(f"{path}: '{name}' is {found}, expected {dtype} {shape}")


def _messages(path: Path, about: dict[str, str]) -> list[dict]:
    """The conversation in a file's metadata. Raises UserError for anything else."""
    try:
        messages = json.loads(about.get("messages", "[]"))
    except (ValueError, RecursionError):
        messages = None
    texts = ("role", "content")
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and all(isinstance(m.get(text), str) for text in texts) for m in messages
    ):
        raise UserError(f"{path}: its conversation is not a list of messages")
    return messages


def _pending(path: Path, about: dict[str, str], vocab_size: int | None) -> list[int]:
    """The tokens that were not computed yet. Raises UserError for anything but token ids."""
    try:
        pending = json.loads(about.get("pending", "[]"))
    except (ValueError, RecursionError):
        pending = None
    if not isinstance(pending, list) or not all(type(token) is int for token in pending):
        raise UserError(f"{path}: its pending tokens are not a list of token ids")
    if vocab_size is not None:
        check_token_ids(pending, vocab_size, f"{path}: its text")
    return pending


def _read(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        arrays, about = mx.load(str(path), format="safetensors", return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({one_line(error)})") from error
    return dict(arrays), dict(about)


class ReusingModel:
    """An MLX step model whose prefill reuses the prefix shared with the previous text.

    text: may be shared by several models with the same content; one generation at a time. `reused`:
    prompt tokens that the last prefill did not compute.
    """

    def __init__(self, model: MLXStepModel, text: CachedText) -> None:
        self._model = model
        self.use(text)
        self._plain_only = model.config.main_attends_streams
        self._tree: DraftTree | None = None
        self.reused = 0

    def use(self, text: CachedText) -> None:
        """Go on with another text of the same content."""
        self.text, self._model.cache = text, text.kv

    @property
    def limits(self) -> StepLimits:
        return self._model.limits

    def keep(self, num_kept: int) -> None:
        """As `MLXStepModel.keep`."""
        self._model.keep(num_kept)

    def prefill(self, tokens: Sequence[int], choose: Choose | None = None, defer: bool = False) -> Proposal:
        """As `StepModel.prefill`, reusing the prefix shared with the cached text."""
        text = self.text
        self.reused = text.common(tokens)
        text.trim(self.reused)
        proposal = self._model.prefill(tokens, choose, self.reused, defer)
        text.tokens[:] = [int(token) for token in tokens]
        text.reusable = len(tokens) - self._plain_only
        return proposal

    def step(self, tree: DraftTree, choose: Choose | None = None, defer: bool = False) -> Verified:
        self._tree = tree
        return self._model.step(tree, choose, defer)

    def streams(self) -> np.ndarray:
        return self._model.streams()

    def commit(self, path: Sequence[int]) -> None:
        self._model.commit(path)
        self.text.tokens.extend(int(self._tree.tokens[node]) for node in path)
        if not self._plain_only:
            self.text.reusable = len(self.text.tokens)
