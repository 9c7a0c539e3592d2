"""All adapters of a bundle over one copy of the base weights, chosen per request without a reload."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
from mlx.utils import tree_flatten

from ss_device.bundle import Bundle, BundledAdapter, open_bundle
from ss_device.errors import UserError
from ss_device.tree import BigramBias
from ss_runtime.mlx.cached_text import CachedText, ReusingModel, cache_content
from ss_runtime.mlx.loading import adapter_model, base_arrays, mlx_settings
from ss_runtime.mlx.step_model import MLXStepModel
from ss_runtime.plain_base import base_name, plain_base
from ss_runtime.settings import DTYPES, RuntimeSettings, default_dtype


@dataclass(frozen=True)
class ResidentAdapter:
    """One loaded adapter. num_bytes: memory that it takes beside the base, its bias included.

    A bigram bias that adapters share is held once, and counted with each.
    """

    adapter: BundledAdapter
    model: ReusingModel
    bigram_bias: BigramBias | None
    num_bytes: int


class AdapterBank:
    """Adapters of one bundle on MLX. One generation at a time; activating is a look-up.

    settings: one for all adapters; names: what to load at once (None: all). The base alone is always there,
    under `base_name`. Models whose keys and values depend on the same things share one prompt cache. Raises
    UserError for a bundle without MLX weights or an unknown adapter.
    """

    def __init__(
        self,
        bundle: Bundle,
        settings: RuntimeSettings | None = None,
        names: list[str] | None = None,
    ) -> None:
        settings = settings or RuntimeSettings()
        if settings.dtype not in (None, *DTYPES["mlx"]):
            raise UserError(f"dtype '{settings.dtype}' is not one of {', '.join(DTYPES['mlx'])}")
        self.bundle = bundle
        self.settings = replace(settings, dtype=settings.dtype or default_dtype("mlx"))
        self._base = base_arrays(bundle, self.settings.dtype, settings.quantize)
        mx.eval(self._base)
        self._resident: dict[str, ResidentAdapter] = {}
        self._texts: dict[str, CachedText] = {}
        self._plain = self._open(plain_base(bundle.manifest))
        for name in sorted(bundle.manifest.adapters) if names is None else names:
            self.load(name)
        bundle.check_unchanged()

    @property
    def names(self) -> list[str]:
        """The loaded adapters."""
        return sorted(self._resident)

    @property
    def base_name(self) -> str:
        """The base alone, as a name for `activate`."""
        return base_name(self.bundle.manifest)

    @property
    def base_bytes(self) -> int:
        """Device memory of the base weights, held once."""
        return sum(array.nbytes for array in self._base.values())

    def memory(self) -> dict[str, int]:
        """Bytes that every loaded adapter takes beside the base."""
        return {name: self._resident[name].num_bytes for name in self.names}

    def device_memory(self) -> dict[str, int]:
        """Bytes of all live arrays of this process, and of freed buffers that MLX keeps for reuse."""
        return {"live": mx.get_active_memory(), "freed": mx.get_cache_memory()}

    def prompt_caches(self) -> list[dict[str, int]]:
        """Tokens and buffer bytes of every prompt cache."""
        return [
            {"tokens": len(text.tokens), "bytes": text.kv.num_bytes} for text in list(self._texts.values())
        ]

    def activate(self, name: str | None = None) -> ResidentAdapter:
        """The named adapter or the base alone; None: the only adapter. Raises UserError if not loaded."""
        if name == self.base_name:
            return self._plain
        if name is None and len(self._resident) == 1:
            return next(iter(self._resident.values()))
        if name not in self._resident:
            loaded = ", ".join(self.names) or "none"
            raise UserError(
                f"no adapter '{name}' is loaded (loaded: {loaded})"
                if name
                else f"name one of the loaded adapters: {loaded}"
            )
        return self._resident[name]

    def load(self, name: str) -> ResidentAdapter:
        """Load an adapter of the bundle; a loaded one stays as it is.

        The bundle is read again for one that it did not have when it was opened (`ss-convert --into`).
        """
        if name not in self._resident:
            if name not in self.bundle.manifest.adapters:
                self.bundle = self._read_again()
            self._resident[name] = self._open(self.bundle.adapter(name))
        return self._resident[name]

    def _read_again(self) -> Bundle:
        bundle = open_bundle(self.bundle.path)
        if bundle.manifest.base != self.bundle.manifest.base:
            raise UserError(f"{bundle.path}: has another base now; open it again")
        return bundle

    def _open(self, adapter: BundledAdapter) -> ResidentAdapter:
        """Build an adapter's model over the base's arrays."""
        settings = mlx_settings(self.bundle, adapter, self.settings)
        model = adapter_model(self.bundle, adapter, self._base, settings)
        mx.eval(model.decoder.parameters())
        content = cache_content(self.bundle, adapter, settings)
        text = self._texts.setdefault(content, CachedText(content, model.cache))
        bias = self._bigram_bias(adapter)
        return ResidentAdapter(adapter, ReusingModel(model, text), bias, self._own_bytes(model, bias))

    def unload(self, name: str) -> None:
        """Forget a loaded adapter and, where no other one shares it, its prompt cache."""
        if name == self.base_name:
            raise UserError(f"'{name}' is the base, which cannot be unloaded")
        text = self.activate(name).model.text
        del self._resident[name]
        if all(other.model.text is not text for other in [self._plain, *self._resident.values()]):
            del self._texts[text.content]

    def _bigram_bias(self, adapter: BundledAdapter) -> BigramBias | None:
        """Read, or that of a loaded adapter which has the same file of shared factors."""
        file = adapter.bigram_bias_file
        same = (r for r in self._resident.values() if file and r.adapter.bigram_bias_file == file)
        found = next(same, None)
        return found.bigram_bias if found else self.bundle.bigram_bias(adapter)

    def _own_bytes(self, model: MLXStepModel, bias: BigramBias | None) -> int:
        """Bytes of the model's weights that are not the base's."""
        total = sum(array.nbytes for _, array in tree_flatten(model.decoder.parameters()))
        total += model.decoder.merged_bytes
        return total - self.base_bytes + (bias.u.nbytes + bias.v.nbytes if bias else 0)
