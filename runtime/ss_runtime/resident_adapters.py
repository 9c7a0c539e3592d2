"""Adapters of a bundle that are ready to run, chosen per request without a reload; any back end."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ss_device.bundle import Bundle, BundledAdapter, open_bundle
from ss_device.errors import UserError
from ss_device.tree import BigramBias
from ss_runtime.plain_base import base_name
from ss_runtime.reused_text import ReusableModel, ReusableText, ReusingModel
from ss_runtime.settings import RuntimeSettings, default_dtype


@dataclass(frozen=True)
class ResidentAdapter:
    """One loaded adapter. num_bytes: memory that it takes beside the base, its bias included.

    A bigram bias that adapters share is held once, and counted with each.
    """

    adapter: BundledAdapter
    model: ReusingModel
    bigram_bias: BigramBias | None
    num_bytes: int


class ResidentAdapters:
    """Adapters of one bundle on one back end. One generation at a time; activating is a look-up.

    settings: one for all adapters, the back end said. Models whose keys and values depend on the same
    things share one text. Subclasses open what an adapter runs on (`_open`), and the base alone where they
    can (`_plain`). Raises UserError for settings that do not go together.
    """

    text_class: type[ReusableText] = ReusableText

    def __init__(self, bundle: Bundle, settings: RuntimeSettings) -> None:
        settings.check()
        self.bundle = bundle
        self.settings = replace(settings, dtype=settings.dtype or default_dtype(settings.backend))
        self._resident: dict[str, ResidentAdapter] = {}
        self._texts: dict[str, ReusableText] = {}
        self._plain: ResidentAdapter | None = None

    @property
    def names(self) -> list[str]:
        """The loaded adapters."""
        return sorted(self._resident)

    @property
    def base_name(self) -> str:
        """The base alone, as a name for `activate`."""
        return base_name(self.bundle.manifest)

    @property
    def models(self) -> list[str]:
        """What can be activated: the loaded adapters and, where the back end runs it, the base alone."""
        return [*self.names, *([self.base_name] if self._plain else [])]

    @property
    def base_bytes(self) -> int:
        """Bytes of what all adapters share."""
        raise NotImplementedError

    def memory(self) -> dict[str, int]:
        """Bytes that every loaded adapter takes beside the base."""
        return {name: self._resident[name].num_bytes for name in self.names}

    def device_memory(self) -> dict[str, int]:
        """Bytes on the device as a whole, where the back end tells."""
        return {}

    def prompt_caches(self) -> list[dict[str, int | None]]:
        """Tokens and buffer bytes of every text's keys and values; None: the back end does not tell."""
        return [
            {"tokens": len(text.tokens), "bytes": text.kv.num_bytes} for text in list(self._texts.values())
        ]

    def activate(self, name: str | None = None) -> ResidentAdapter:
        """The named adapter or the base alone; None: the only adapter. Raises UserError if not loaded."""
        if self._plain and name == self.base_name:
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

    def load_all(self, names: list[str] | None) -> None:
        """Load these adapters, by default all; of one bundle, which was not replaced meanwhile."""
        for name in sorted(self.bundle.manifest.adapters) if names is None else names:
            self.load(name)
        self.bundle.check_unchanged()

    def unload(self, name: str) -> None:
        """Forget a loaded adapter and, where no other one shares it, its text."""
        if self._plain and name == self.base_name:
            raise UserError(f"'{name}' is the base, which cannot be unloaded")
        text = self.activate(name).model.text
        del self._resident[name]
        others = [*([self._plain] if self._plain else []), *self._resident.values()]
        if all(other.model.text is not text for other in others):
            del self._texts[text.content]

    def _open(self, adapter: BundledAdapter) -> ResidentAdapter:
        raise NotImplementedError

    def _reusing(self, model: ReusableModel, content: str) -> ReusingModel:
        """The model on the text of its content; the first one's cache serves all."""
        return ReusingModel(model, self._texts.setdefault(content, self.text_class(content, model.cache)))

    def _bigram_bias(self, adapter: BundledAdapter) -> BigramBias | None:
        """Read, or that of a loaded adapter which has the same file of shared factors."""
        file = adapter.bigram_bias_file
        same = (r for r in self._resident.values() if file and r.adapter.bigram_bias_file == file)
        found = next(same, None)
        return found.bigram_bias if found else self.bundle.bigram_bias(adapter)

    def _read_again(self) -> Bundle:
        bundle = open_bundle(self.bundle.path)
        if bundle.manifest.base != self.bundle.manifest.base:
            raise UserError(f"{bundle.path}: has another base now; open it again")
        return bundle


def bias_bytes(bias: BigramBias | None) -> int:
    """Memory of a bigram bias."""
    return bias.u.nbytes + bias.v.nbytes if bias else 0
