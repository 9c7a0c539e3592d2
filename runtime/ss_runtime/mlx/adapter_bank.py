"""All adapters of a bundle over one copy of the base weights in MLX."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
from mlx.utils import tree_flatten

from ss_device.bundle import Bundle, BundledAdapter
from ss_runtime.mlx.cached_text import CachedText
from ss_runtime.mlx.loading import adapter_model, base_arrays, mlx_settings
from ss_runtime.mlx.step_model import MLXStepModel
from ss_runtime.plain_base import plain_base
from ss_runtime.resident_adapters import ResidentAdapter, ResidentAdapters, bias_bytes
from ss_runtime.reused_text import cache_content
from ss_runtime.settings import RuntimeSettings


class AdapterBank(ResidentAdapters):
    """`ResidentAdapters` on MLX. The base alone is always there, under `base_name`.

    names: what to load at once (None: all). Raises UserError also for a bundle without MLX weights or an
    unknown adapter.
    """

    text_class = CachedText

    def __init__(
        self,
        bundle: Bundle,
        settings: RuntimeSettings | None = None,
        names: list[str] | None = None,
    ) -> None:
        super().__init__(bundle, replace(settings or RuntimeSettings(), backend="mlx"))
        self._base = base_arrays(bundle, self.settings.dtype, self.settings.quantize)
        mx.eval(self._base)
        self._plain = self._open(plain_base(bundle.manifest))
        self.load_all(names)

    @property
    def base_bytes(self) -> int:
        """Device memory of the base weights, held once."""
        return sum(array.nbytes for array in self._base.values())

    def device_memory(self) -> dict[str, int]:
        """Bytes of all live arrays of this process, and of freed buffers that MLX keeps for reuse."""
        return {"live": mx.get_active_memory(), "freed": mx.get_cache_memory()}

    def _open(self, adapter: BundledAdapter) -> ResidentAdapter:
        """Build an adapter's model over the base's arrays."""
        settings = mlx_settings(self.bundle, adapter, self.settings)
        model = adapter_model(self.bundle, adapter, self._base, settings)
        mx.eval(model.decoder.parameters())
        reusing = self._reusing(model, cache_content(self.bundle, adapter, settings))
        bias = self._bigram_bias(adapter)
        return ResidentAdapter(adapter, reusing, bias, self._own_bytes(model) + bias_bytes(bias))

    def _own_bytes(self, model: MLXStepModel) -> int:
        """Bytes of the model's weights that are not the base's."""
        total = sum(array.nbytes for _, array in tree_flatten(model.decoder.parameters()))
        return total + model.decoder.merged_bytes - self.base_bytes
