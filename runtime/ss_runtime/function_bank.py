"""All adapters of a bundle over its functions: Core AI, Core ML, the reference executor."""

from __future__ import annotations

from ss_device.bundle import Bundle, BundledAdapter
from ss_runtime.backends import open_backend
from ss_runtime.resident_adapters import ResidentAdapter, ResidentAdapters, bias_bytes
from ss_runtime.reused_text import cache_content
from ss_runtime.settings import RuntimeSettings, functions_of


class FunctionBank(ResidentAdapters):
    """`ResidentAdapters` on the functions of a bundle's assets or packages; the base alone has none.

    settings: their back end is one of `FUNCTION_BACKENDS`; names: what to load at once (None: all). Raises
    UserError also where the back end is not to be had or an adapter has no functions for it.
    """

    def __init__(self, bundle: Bundle, settings: RuntimeSettings, names: list[str] | None = None) -> None:
        super().__init__(bundle, settings)
        self.load_all(names)

    @property
    def base_bytes(self) -> int:
        """Size of the files that the loaded adapters' functions are in, on disk."""
        backend, files = self.settings.backend, self.bundle.manifest.files
        loaded = [functions_of(backend, entry.adapter) for entry in list(self._resident.values())]
        packages = {f"{package}/" for functions in loaded for package in functions.packages}
        return sum(file.bytes for name, file in files.items() if name.startswith(tuple(packages)))

    def _open(self, adapter: BundledAdapter) -> ResidentAdapter:
        model = open_backend(self.bundle, adapter, self.settings)
        # The functions of one package, or of one asset, take each other's states.
        content = f"{cache_content(self.bundle, adapter, self.settings)} {model.functions.package}"
        bias = self._bigram_bias(adapter)
        return ResidentAdapter(
            adapter, self._reusing(model, content), bias, model.input_bytes + bias_bytes(bias)
        )
