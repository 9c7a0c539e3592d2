"""A prompt cache in a file, for `ss-generate`: taken up, trimmed, written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ss_device.bundle import Bundle, BundledAdapter
from ss_device.command_line import positive
from ss_device.errors import UserError
from ss_device.outputs import check_writable
from ss_device.settings import setting
from ss_device.step_model import StepModel
from ss_runtime.reused_text import ReusingModel, cache_content
from ss_runtime.settings import RuntimeSettings, default_dtype


@dataclass(frozen=True)
class CacheSettings:
    """Where keys and values of the text so far are kept."""

    prompt_cache: Path | None = setting(
        metavar="FILE",
        help="keys and values of the text so far (MLX): taken up where FILE is there, written in the end; "
        "--chat goes on with the conversation",
    )
    trim_cache: int | None = setting(parse=positive, help="keep the first N tokens of --prompt-cache alone")

    def check(self) -> None:
        """Refuse settings that cannot be met, before anything is loaded."""
        if self.prompt_cache is None:
            if self.trim_cache:
                raise UserError("--trim-cache needs --prompt-cache")
            return
        check_writable(self.prompt_cache)
        if self.trim_cache and not self.prompt_cache.exists():
            raise UserError(f"{self.prompt_cache}: no such file to trim")


def with_cache(
    model: StepModel,
    bundle: Bundle,
    adapter: BundledAdapter,
    settings: RuntimeSettings,
    cache: CacheSettings,
) -> tuple[StepModel, list[dict]]:
    """An MLX model that reuses the prefix shared with the previous text, and the messages of its file."""
    from ss_runtime.mlx.cached_text import CachedText

    settings = replace(settings, dtype=settings.dtype or default_dtype("mlx"))
    text = CachedText(cache_content(bundle, adapter, settings), model.cache)
    file, messages = cache.prompt_cache, []
    if file is not None and file.exists():
        messages = text.load(file, model.limits.context, model.limits.vocab_size)
    if cache.trim_cache:
        text.trim(cache.trim_cache)
        messages = []
    return ReusingModel(model, text), messages
