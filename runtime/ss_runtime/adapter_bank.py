"""All adapters of a bundle over one copy of the base weights, chosen per request without a reload."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
from mlx.utils import tree_flatten

from ss_device.bundle import Bundle, BundledAdapter
from ss_device.errors import UserError
from ss_device.tree import ParentBias
from ss_runtime.loading import BASE_FILE, default_stream_rows, load_arrays
from ss_runtime.mlx_model import DTYPES, MLXStepModel
from ss_runtime.prompt_cache import CachedText, ReusingModel, cache_content


@dataclass(frozen=True)
class ResidentAdapter:
    """One loaded adapter. num_bytes: memory that it takes beside the base, its bias included.

    A parent bias that adapters share is held once, and counted with each.
    """

    adapter: BundledAdapter
    model: ReusingModel
    parent_bias: ParentBias | None
    num_bytes: int


class AdapterBank:
    """Adapters of one bundle on MLX. One generation at a time; activating is a look-up.

    names: what to load at once (None: all). Models whose keys and values depend on the same things share
    one prompt cache. Raises UserError for a bundle without MLX weights or an unknown adapter.
    """

    def __init__(self, bundle: Bundle, dtype: str, names: list[str] | None = None) -> None:
        if dtype not in DTYPES:
            raise UserError(f"dtype '{dtype}' is not one of {', '.join(DTYPES)}")
        self.bundle, self.dtype = bundle, dtype
        kind = getattr(mx, dtype)
        self._base = {
            name: array.astype(kind) for name, array in load_arrays(bundle.path / BASE_FILE).items()
        }
        mx.eval(self._base)
        self._resident: dict[str, ResidentAdapter] = {}
        self._texts: dict[str, CachedText] = {}
        for name in sorted(bundle.manifest.adapters) if names is None else names:
            self.load(name)

    @property
    def names(self) -> list[str]:
        """The loaded adapters."""
        return sorted(self._resident)

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
        """The named adapter, or the only one. Raises UserError when it is not loaded."""
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
        """Load an adapter of the bundle; a loaded one stays as it is."""
        if name in self._resident:
            return self._resident[name]
        adapter = self.bundle.adapter(name)
        sizes = adapter.coreml
        pruning = {"num_kept": sizes.num_kept, "prune_over": sizes.prune_over} if sizes else {}
        model = MLXStepModel(
            self.bundle.manifest.architecture,
            adapter.config,
            self._base,
            load_arrays(self.bundle.path / adapter.tensor_file),
            num_nodes=adapter.num_nodes,
            context=self.bundle.manifest.architecture.default_context,
            dtype=self.dtype,
            stream_rows=default_stream_rows(adapter.config),
            **pruning,
        )
        mx.eval(model.decoder.parameters())
        content = cache_content(self.bundle, adapter, self.dtype)
        text = self._texts.setdefault(content, CachedText(content, model.cache))
        bias = self._parent_bias(adapter)
        resident = ResidentAdapter(adapter, ReusingModel(model, text), bias, self._own_bytes(model, bias))
        self._resident[name] = resident
        return resident

    def unload(self, name: str) -> None:
        """Forget a loaded adapter and, where no other one shares it, its prompt cache."""
        text = self.activate(name).model.text
        del self._resident[name]
        if all(other.model.text is not text for other in self._resident.values()):
            del self._texts[text.content]

    def _parent_bias(self, adapter: BundledAdapter) -> ParentBias | None:
        """Read, or that of a loaded adapter which has the same file of shared factors."""
        file = adapter.parent_bias_file
        same = (r for r in self._resident.values() if file and r.adapter.parent_bias_file == file)
        found = next(same, None)
        return found.parent_bias if found else self.bundle.parent_bias(adapter)

    def _own_bytes(self, model: MLXStepModel, bias: ParentBias | None) -> int:
        """Bytes of the model's weights that are not the base's."""
        total = sum(array.nbytes for _, array in tree_flatten(model.decoder.parameters()))
        return total - self.base_bytes + (bias.u.nbytes + bias.v.nbytes if bias else 0)
