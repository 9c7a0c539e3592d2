"""The methods that `ss-bench run` measures: ours in one runtime, other libraries' on the same weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ss_device.base_model import open_base, weight_files
from ss_device.bundle import Bundle, BundledAdapter
from ss_device.checkpoint_weights import stored_tensors
from ss_device.decoding import Drafter, Step, decode
from ss_device.draft_choice import DraftChoice
from ss_device.draft_policy import AdaptiveDrafter
from ss_device.errors import UserError, library_errors, one_line
from ss_device.files import check_plain
from ss_device.native_output import native_output_dropped
from ss_device.prompt_lookup import PromptLookup, PromptLookupChain
from ss_device.step_model import StepModel
from ss_device.strict_json import read_json
from ss_runtime.backends import hugging_face_model, open_backend
from ss_runtime.settings import RuntimeSettings, default_dtype
from ss_runtime.tuning import AdaptiveChoice, read_tuning

OURS = ("plain", "ss", "ss-lookup", "ss-tuned", "prompt-lookup")
FOREIGN = ("mlx-lm", "mlx-lm-draft", "hf", "hf-prompt-lookup", "hf-assisted")
METHODS = OURS + FOREIGN


@dataclass
class Run:
    """One prompt's generation. tokens: ids up to and with the end token; seconds: to the first token
    (None where a method does not tell) and in all; model_seconds: per model call after the prompt's,
    the host's drafting left out; steps: our decoding loop's records."""

    tokens: list[int]
    seconds: float
    first_token: float | None = None
    model_seconds: list[float] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


# (prompt ids, max tokens) → Run. One that learns from run to run also has `forget()`.
Method = Callable[[Sequence[int], int], Run]


@dataclass(frozen=True)
class Setting:
    """What the methods share. base, draft: Hugging Face folders, for methods that load one.

    runtime: of ours, back end said; draft_tokens: how far mlx-lm's draft model writes ahead.
    """

    bundle: Bundle
    adapter: BundledAdapter
    runtime: RuntimeSettings
    base: Path | None = None
    draft: Path | None = None
    draft_tokens: int = 2

    @property
    def dtype(self) -> str:
        return self.runtime.dtype or default_dtype(self.runtime.backend)

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset(self.bundle.manifest.architecture.eos_ids)


def open_method(name: str, setting: Setting) -> Method:
    """A method by name. Raises UserError for an unknown one or one that cannot run here."""
    if name in OURS:
        return OurMethod(name, setting)
    if setting.runtime.kv_bits and name in FOREIGN:
        raise UserError(f"--kv-bits is for this runtime's methods: leave '{name}' out")
    if name in ("mlx-lm", "mlx-lm-draft"):
        return _mlx_lm(setting, with_draft=name == "mlx-lm-draft")
    if name in FOREIGN:
        return _hugging_face(name, setting)
    raise UserError(f"unknown method '{name}' (known: {', '.join(METHODS)})")


def drafter_of(name: str, setting: Setting) -> Drafter | AdaptiveDrafter | PromptLookupChain:
    """The drafter of one of our methods."""
    adapter = setting.adapter
    bias = setting.bundle.bigram_bias(adapter)
    if name == "plain":
        return Drafter(1)
    if name == "ss":
        return Drafter(adapter.num_nodes, bigram_bias=bias)
    if name == "ss-lookup":
        return Drafter(adapter.num_nodes, bigram_bias=bias, lookup=PromptLookup())
    if name == "prompt-lookup":
        return PromptLookupChain(min(11, adapter.num_nodes))
    return tuned_choice(setting).drafter(bias)


def tuned_choice(setting: Setting) -> DraftChoice | AdaptiveChoice:
    """What `ss-bench tune` chose. Raises UserError where it did not run, and off MLX, which it is of."""
    app, backend = setting.adapter.app, setting.runtime.backend
    if backend != "mlx":
        raise UserError(
            f"ss-bench tune chooses for MLX, not for back end '{backend}': leave 'ss-tuned' out"
        )
    choice = read_tuning(setting.bundle, app, setting.dtype)
    if choice is None:
        raise UserError(f"{setting.bundle.path}: no tuning for '{app}' in {setting.dtype} (ss-bench tune)")
    return choice


def uses_mlx(name: str, backend: str) -> bool:
    """Whether a method computes with MLX. backend: of ours."""
    return name.startswith("mlx-lm") or (name in OURS and backend == "mlx")


class OurMethod:
    """A drafter of ours on the setting's back end."""

    def __init__(self, name: str, setting: Setting) -> None:
        self._name, self._setting = name, setting
        kept = None
        if name == "ss-tuned":
            kept = tuned_choice(setting).num_kept or setting.adapter.num_nodes
        self.forget()
        settings = replace(setting.runtime, num_kept=kept)
        if self._drafter.num_nodes == 1 or not getattr(self._drafter, "use_streams", False):
            settings = settings.without_streams(setting.adapter)
        model = open_backend(setting.bundle, setting.adapter, settings)
        self._model = TimedModel(model)

    def forget(self) -> None:
        """Reset to the experience that the drafter begins with."""
        self._drafter = drafter_of(self._name, self._setting)

    def __call__(self, prompt: Sequence[int], max_tokens: int) -> Run:
        start = time.perf_counter()
        steps = decode(self._model, self._drafter, prompt, max_tokens, self._setting.stop_ids)
        records = [next(steps)]
        first = time.perf_counter() - start
        records.extend(steps)
        seconds = time.perf_counter() - start
        tokens = [token for record in records for token in record.tokens]
        return Run(tokens, seconds, first, list(self._model.seconds), records[1:])


class TimedModel:
    """A step model with the seconds of its steps, streams that were put off included."""

    def __init__(self, model: StepModel) -> None:
        self._model, self.limits, self.seconds = model, model.limits, []

    def prefill(self, tokens, **options):
        proposal = self._model.prefill(tokens, **options)
        self.seconds = []
        return proposal

    def step(self, tree, **options):
        start = time.perf_counter()
        verified = self._model.step(tree, **options)
        self.seconds.append(time.perf_counter() - start)
        return verified

    def streams(self):
        start = time.perf_counter()
        logits = self._model.streams()
        if self.seconds:  # else they belong to the prompt
            self.seconds[-1] += time.perf_counter() - start
        return logits

    def commit(self, path):
        self._model.commit(path)


def _base_folder(setting: Setting, method: str) -> Path:
    """The base's own folder, checked against the bundle's digest."""
    if setting.base is None:
        raise UserError(f"method '{method}' loads the base model's folder: give --base")
    base, wanted = open_base(setting.base), setting.bundle.manifest.base.sha256
    found = base.identity.sha256
    if found != wanted:
        raise UserError(
            f"{setting.base}: sha256 {found[:12]}…, the bundle was made from a base with {wanted[:12]}…"
        )
    return base.path


def _draft_folder(setting: Setting, method: str) -> Path:
    """The small model's folder, with the files that loading it takes.

    Its vocabulary must be as large as the bundle's: mlx-lm looks each model's tokens up in the other's
    embedding, and MLX reads out of bounds without a word.
    """
    folder = setting.draft
    if folder is None:
        raise UserError(f"method '{method}' needs a small model with the same tokenizer: give --draft")
    if not folder.is_dir():
        raise UserError(f"--draft {folder}: no such folder")
    check_plain(folder)
    found = read_json(folder / "config.json").get("vocab_size")
    wanted = setting.bundle.manifest.architecture.vocab_size
    if found != wanted:
        raise UserError(f"--draft {folder}: vocab_size is {found!r:.80}, the bundle's is {wanted}")
    for file in weight_files(folder):
        stored_tensors(file)  # MLX's own reader trusts the offsets of a header
    return folder


def _old_rope_names(folder: Path) -> dict:
    """`rope_theta` where mlx-lm looks for it: transformers 5 writes it into `rope_parameters` alone, and
    mlx-lm would silently take its default."""
    config = read_json(folder / "config.json")
    theta = (config.get("rope_parameters") or {}).get("rope_theta")
    return {"rope_theta": theta} if theta is not None and "rope_theta" not in config else {}


def _mlx_lm(setting: Setting, with_draft: bool) -> Method:
    """mlx-lm's own `stream_generate`, with its draft-model decoding on request."""
    try:
        import mlx.core as mx
        from mlx_lm import stream_generate
        from mlx_lm.utils import load_model, load_tokenizer
    except ImportError as error:
        raise UserError(f"mlx-lm cannot be loaded: {one_line(error)}") from error
    folder = _base_folder(setting, "mlx-lm-draft" if with_draft else "mlx-lm")
    draft = _draft_folder(setting, "mlx-lm-draft") if with_draft else None

    def loaded(of: Path):
        return load_model(of, model_config=_old_rope_names(of), trust_remote_code=False)[0]

    with library_errors(f"{folder}: mlx-lm cannot load this base model"), native_output_dropped():
        model, tokenizer = loaded(folder), load_tokenizer(folder, {"trust_remote_code": False})
    model.set_dtype(getattr(mx, setting.dtype))
    options = {}
    if draft is not None:
        with library_errors(f"--draft {draft}: cannot be loaded"):
            options["draft_model"] = loaded(draft)
        options["draft_model"].set_dtype(getattr(mx, setting.dtype))
        options["num_draft_tokens"] = setting.draft_tokens
    tokenizer.eos_token_ids = set(setting.stop_ids)

    def run(prompt: Sequence[int], max_tokens: int) -> Run:
        tokens, first, start = [], None, time.perf_counter()
        for response in stream_generate(model, tokenizer, list(prompt), max_tokens=max_tokens, **options):
            tokens.append(response.token)
            first = first or time.perf_counter() - start
        return Run(tokens, time.perf_counter() - start, first)

    return run


def _hugging_face(name: str, setting: Setting) -> Method:
    """Hugging Face `generate` on torch: plain, prompt lookup (10 tokens) or assisted by a small model."""
    try:
        import torch
        from transformers import AutoModelForCausalLM

        from ss_device.reference.hugging_face import NO_CODE, plain_config
    except ImportError as error:
        raise UserError(f"method '{name}' needs torch and transformers: {one_line(error)}") from error
    kind = getattr(torch, setting.dtype)
    model = hugging_face_model(setting.bundle, setting.dtype)
    options: dict = {"do_sample": False, "eos_token_id": sorted(setting.stop_ids) or None}
    options["pad_token_id"] = min(setting.stop_ids, default=0)
    if name == "hf-prompt-lookup":
        options["prompt_lookup_num_tokens"] = 10
    if name == "hf-assisted":
        draft = _draft_folder(setting, name)
        with library_errors(f"--draft {draft}: cannot be loaded"):
            assistant = AutoModelForCausalLM.from_pretrained(
                draft, config=plain_config(draft), dtype=kind, **NO_CODE
            )
        options["assistant_model"] = assistant.eval()

    def run(prompt: Sequence[int], max_tokens: int) -> Run:
        ids = torch.tensor([list(prompt)])
        start = time.perf_counter()
        with torch.no_grad(), library_errors(f"method '{name}': transformers cannot run this model"):
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, **options
            )
        return Run(out[0, len(prompt) :].tolist(), time.perf_counter() - start)

    return run
