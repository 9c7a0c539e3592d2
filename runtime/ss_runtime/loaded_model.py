"""A model that is ready to generate: weights, adapter, drafter, and the tokenizer that belongs to it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ss_device.adapter import Adapter, find_adapter, load_adapter
from ss_device.architecture import Architecture
from ss_device.base_model import BaseIdentity, locate_base, models_folder, weight_files
from ss_device.bundle import MANIFEST, Bundle, BundledAdapter, open_bundle
from ss_device.decoding import Drafter, check_request
from ss_device.draft_policy import AdaptiveDrafter
from ss_device.errors import UserError
from ss_device.sampling import Sampler
from ss_device.settings import check_values
from ss_device.step_model import StepModel
from ss_device.tokenizer_file import read_tokenizer
from ss_runtime.backends import default_backend, load_openblas, open_backend
from ss_runtime.chat_prompt import ChatPrompt
from ss_runtime.drafts import choose_drafts
from ss_runtime.plain_base import CONFIG, MAX_TOKENS, NUM_NODES, base_name, plain_base
from ss_runtime.reused_text import ReusingModel
from ss_runtime.settings import DraftSettings, RuntimeSettings
from ss_runtime.tokenization import BundleTokenizer

if TYPE_CHECKING:
    from ss_runtime.mlx.adapter_bank import AdapterBank
    from ss_runtime.mlx.cached_text import CachedText


class ModelTokenizer(BundleTokenizer):
    """The tokenizer of a bundle or a base folder, with the chat template beside it."""

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        super().__init__(read_tokenizer(folder), architecture.bos_id, architecture.vocab_size)
        self._folder = folder
        self.eos_token_ids = set(architecture.eos_ids)

    @cached_property
    def _chat(self) -> ChatPrompt:
        return ChatPrompt(self._folder, self)

    @property
    def chat_template(self) -> str | None:
        """The base's template; None where it has none."""
        return self._chat.template

    def apply_chat_template(
        self, messages: Sequence[dict], add_generation_prompt: bool = True, tokenize: bool = True
    ) -> list[int] | str:
        """Token ids, or text, of messages with `role` and `content`; without a template joined by lines.

        Raises UserError when the template refuses them.
        """
        render = self._chat.ids if tokenize else self._chat.text
        return render(list(messages), add_generation_prompt)


class SpeculativeModel:
    """An adapter (or the base alone) that can generate. Made by `ss_runtime.load`.

    adapter: prompt template, stop strings, sizes; drafter: grows the drafts of the next generation; an
    adaptive one learns from one to the next. One generation at a time.
    """

    def __init__(
        self,
        architecture: Architecture,
        adapter: BundledAdapter,
        step_model: StepModel,
        drafter: Drafter | AdaptiveDrafter,
        family: AdapterFamily | None = None,
    ) -> None:
        self.architecture, self.adapter = architecture, adapter
        self.step_model, self.drafter, self._family = step_model, drafter, family
        self._turn: object = None

    @property
    def name(self) -> str:
        """The adapter's name, or the base's."""
        return self.adapter.app

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        return frozenset(self.architecture.eos_ids)

    @property
    def context(self) -> int:
        """Tokens that prompt and text may have together."""
        return self.step_model.limits.context

    def prompt(self, **fields: str) -> str:
        """The adapter's prompt template, filled. Raises UserError that names a missing field."""
        return self.adapter.prompt(fields)

    @property
    def on_mlx(self) -> bool:
        """Whether MLX computes; other back ends keep no prompt caches."""
        return hasattr(self.step_model, "text")

    def new_text(self) -> CachedText:
        """An empty text for keys and values like this model's. Raises UserError on other back ends."""
        from ss_runtime.mlx.cached_text import CachedText

        self._check_mlx()
        text = self.step_model.text
        return CachedText(text.content, text.kv.empty())

    def begin(self, text: CachedText | None) -> object:
        """Begin a generation, on this text or (None) one of the model's own. → a mark for `check_turn`.

        Raises UserError where the text's keys and values are another model's.
        """
        if text is not None or self.on_mlx:
            self._use(self._own_text if text is None else text)
        self._turn = turn = object()
        return turn

    def check_turn(self, turn: object) -> None:
        """Raise RuntimeError where another generation was begun since: its text has taken the place."""
        if self._turn is not turn:
            raise RuntimeError("another generation was begun on this model before this one ended")

    @cached_property
    def _own_text(self) -> CachedText:
        return self.new_text()

    def _use(self, text: CachedText) -> None:
        self._check_mlx()
        if text.content != self.step_model.text.content:
            raise UserError(f"the prompt cache is of another base, dtype or adapter than '{self.name}'")
        self.step_model.use(text)

    def _check_mlx(self) -> None:
        if not self.on_mlx:
            raise UserError("prompt caches are of MLX; this model runs on another back end")

    def with_adapter(self, name: str | None) -> SpeculativeModel:
        """The same base with another adapter of the bundle; None: the base alone. Weights are shared.

        Both models stay usable; the same name gives the same model, with what its drafter has learned. MLX
        only. Raises UserError for an unknown one.
        """
        if self._family is None:
            raise UserError("with_adapter needs a bundle on the MLX back end: load it again")
        return self._family.model(name)

    def check(self, tokens: Sequence[int], max_tokens: int, sampler: Sampler | None) -> None:
        """Raise UserError for a request that does not fit."""
        check_request(self.step_model.limits, self.drafter.num_nodes, len(tokens), max_tokens, sampler)


class AdapterFamily:
    """Models of a bundle's adapters over one copy of the base, each made once."""

    def __init__(self, bank: AdapterBank, drafts: DraftSettings) -> None:
        self._bank, self._drafts = bank, drafts
        self._models: dict[str | None, SpeculativeModel] = {}

    def model(self, name: str | None) -> SpeculativeModel:
        """An adapter's, loaded if it is not yet; None: the base's. Raises UserError for an unknown one."""
        if name not in self._models:
            self._models[name] = self._made(name)
        return self._models[name]

    def _made(self, name: str | None) -> SpeculativeModel:
        bank = self._bank
        resident = bank.activate(bank.base_name) if name is None else bank.load(name)
        adapter = resident.adapter
        drafts, dtype = self._drafts.within(adapter), bank.settings.dtype
        chosen = choose_drafts(bank.bundle, adapter, drafts, resident.bigram_bias, dtype)
        if chosen.num_kept:
            resident.model.keep(chosen.num_kept)
        architecture = bank.bundle.manifest.architecture
        return SpeculativeModel(architecture, adapter, resident.model, chosen.drafter, self)


def open_model(
    path: Path | str,
    adapter: Path | str | None = None,
    settings: RuntimeSettings | None = None,
    drafts: DraftSettings | None = None,
) -> tuple[SpeculativeModel, ModelTokenizer]:
    """What `ss_runtime.load` returns."""
    settings, drafts = settings or RuntimeSettings(), drafts or DraftSettings()
    check_values(settings)
    check_values(drafts)
    settings.check()
    if (Path(path) / MANIFEST).is_file():
        bundle = open_bundle(path)
        model = _of_bundle(bundle, adapter, settings, drafts)
        return model, ModelTokenizer(bundle.path, bundle.manifest.architecture)
    if settings.backend not in (None, "mlx"):
        raise UserError(f"{path}: no bundle; only back end 'mlx' loads a base folder")
    folder, name = locate_base(Path(path))
    model = _of_folder(folder, name, adapter, settings, drafts)
    return model, ModelTokenizer(folder, model.architecture)


def _of_bundle(
    bundle: Bundle, name: Path | str | None, settings: RuntimeSettings, drafts: DraftSettings
) -> SpeculativeModel:
    """name: None: the only adapter; the base's own name: the base alone."""
    plain = str(name) == base_name(bundle.manifest)
    adapter = plain_base(bundle.manifest) if plain else bundle.adapter(None if name is None else str(name))
    backend = settings.backend or ("mlx" if plain else default_backend(bundle, adapter))
    if backend == "mlx":
        load_openblas()
        from ss_runtime.mlx.adapter_bank import AdapterBank

        bank = AdapterBank(bundle, settings, [] if plain else [adapter.app])
        return AdapterFamily(bank, drafts).model(None if plain else adapter.app)
    if plain:
        raise UserError(f"back end '{backend}' needs an adapter: the base alone runs on MLX")
    bias = bundle.bigram_bias(adapter)
    chosen = choose_drafts(bundle, adapter, drafts, bias, settings.dtype, backend)
    step_model = open_backend(bundle, adapter, replace(settings, backend=backend))
    return SpeculativeModel(bundle.manifest.architecture, adapter, step_model, chosen.drafter)


def _of_folder(
    folder: Path,
    name: str,
    adapter: Path | str | None,
    settings: RuntimeSettings,
    drafts: DraftSettings,
) -> SpeculativeModel:
    """A base folder, alone or with the adapter of an adapter folder."""
    load_openblas()
    from ss_runtime.mlx.cached_text import CachedText
    from ss_runtime.mlx.loading import LoadedFolder

    base = LoadedFolder(folder, settings.dtype, settings.quantize)
    held = _base_alone(name) if adapter is None else load_adapter(_adapter_folder(adapter))
    entry = BundledAdapter(
        app=held.app,
        config=held.config,
        prompt_template=held.prompt_template,
        stop_strings=held.stop_strings,
        max_tokens=held.max_tokens,
        num_nodes=settings.num_nodes or NUM_NODES,
        tensor_file="" if adapter is None else str(adapter),
    )
    settings = replace(settings, num_nodes=entry.num_nodes, dtype=base.dtype)
    if adapter is None:
        settings = replace(settings, stream_rows="none")
    model = base.model(held, settings)
    text = CachedText(_content(folder, settings, adapter), model.cache)
    drafter = drafts.drafter(entry, held.bigram_bias())
    return SpeculativeModel(base.architecture, entry, ReusingModel(model, text), drafter)


def _adapter_folder(adapter: Path | str) -> Path:
    """A folder, or the folder of a name under models/adapters."""
    return Path(adapter) if Path(adapter).is_dir() else find_adapter(str(adapter), models_folder())


def _base_alone(name: str) -> Adapter:
    """The place of an adapter that adds nothing."""
    return Adapter(name, CONFIG, BaseIdentity(name, "", ""), {}, "{prompt}", max_tokens=MAX_TOKENS)


def _content(folder: Path, settings: RuntimeSettings, adapter: Path | str | None) -> str:
    """What keys and values of a base folder depend on, as a sha256.

    Weights count by their files' sizes and times: to read gigabytes for a digest would double the time to
    load. A cache made before a base was replaced in its folder is so refused.
    """
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weight_files(folder)]
    parts = [folder.resolve(), files, settings.dtype, settings.quantize, settings.kv_bits, adapter]
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()
