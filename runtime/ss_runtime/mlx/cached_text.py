"""A text whose keys and values MLX holds, written to a file and read again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from ss_device.errors import UserError, one_line
from ss_device.outputs import file_in_one_go
from ss_device.token_ids import check_token_ids
from ss_runtime.mlx.kv_cache import KVCache, write_rows
from ss_runtime.reused_text import ReusableText

FORMAT_VERSION = 1
NAMES = {"keys", "values", "tokens"}  # that every such file has


class CachedText(ReusableText):
    """A text over MLX's buffers. `pending`: of a loaded text its last tokens, not computed yet."""

    kv: KVCache

    def __init__(self, content: str, kv: KVCache) -> None:
        super().__init__(content, kv)
        self.pending: list[int] = []

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
