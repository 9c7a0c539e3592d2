"""Traces that one machine records with the reference and another one replays (`ss-validate`).

A folder holds `<adapter>.json` and `<adapter>.safetensors` for each adapter, made with a bundle's own
weights: one who has a CUDA machine records there, one who has a Mac replays there, on copies of one bundle.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ss_device.bundle import Bundle, BundledAdapter
from ss_device.command_line import progress, prompts_from_file, row_errors
from ss_device.decoding import Drafter, check_request
from ss_device.errors import UserError
from ss_device.outputs import check_output_folder, folder_in_one_go, holds_only
from ss_device.trace import TRACED_TOKENS, Recorded, Trace, load_traces, save_traces, trace_record
from ss_runtime.backends import open_reference, why_not
from ss_runtime.settings import FUNCTION_BACKENDS, RuntimeSettings
from ss_runtime.tokenization import BundleTokenizer, load_tokenizer
from ss_runtime.validation import stored_golden

PATTERNS = ("*.json", "*.safetensors")


@dataclass(frozen=True)
class Recording:
    """What was recorded of one adapter. seconds: of decoding, without loading."""

    adapter: str
    origin: Recorded
    prompts: int
    tokens: int
    calls: int
    seconds: float

    def to_dict(self) -> dict:
        """JSON form."""
        return {
            "adapter": self.adapter,
            **asdict(self.origin),
            "prompts": self.prompts,
            "tokens": self.tokens,
            "calls": self.calls,
            "seconds": round(self.seconds, 3),
        }


def record_bundle(
    bundle: Bundle,
    names: Sequence[str],
    folder: Path,
    dtype: str = "float32",
    device: str | None = None,
    prompts: Path | None = None,
    limit: int | None = None,
    force: bool = False,
) -> list[Recording]:
    """Record each adapter of `names` with the reference on the bundle's weights; write `folder` in one go.

    prompts: JSON lines with `prompt` or the application's fields (None: the texts of the bundle's golden
    traces). Trees, pruning and context are the bundle's; at most 64 tokens a prompt. Raises UserError where
    the reference cannot run here, and for a prompt that does not fit.
    """
    check_output_folder(folder, "traces", lambda path: holds_only(path, PATTERNS), force, option="--record")
    tokenizer, recordings = load_tokenizer(bundle), []
    for name in names:
        if (reason := why_not("reference", bundle, bundle.adapter(name))) is not None:
            raise UserError(f"--record: {reason}")
    chosen = {name: _prompts(bundle, bundle.adapter(name), tokenizer, prompts, limit) for name in names}
    with folder_in_one_go(folder) as temporary:
        for name in names:
            recordings.append(
                _record(bundle, bundle.adapter(name), chosen[name], temporary, dtype, device, prompts)
            )
    return recordings


def _prompts(
    bundle: Bundle,
    adapter: BundledAdapter,
    tokenizer: BundleTokenizer,
    file: Path | None,
    limit: int | None,
) -> list[tuple[str, list[int]]]:
    """Texts and token ids."""
    if file is not None:
        texts = [text for _, text in prompts_from_file(file, adapter.prompt, limit)]
    elif adapter.golden is not None:
        texts = [trace.text for trace in load_traces(bundle.path / adapter.golden)][:limit]
    else:
        raise UserError(f"{bundle.path}: adapter '{adapter.app}' has no golden prompts; give --prompts")
    encoded = []
    for index, text in enumerate(texts):
        with row_errors(file, index):
            encoded.append((text, tokenizer.encode(text)))
    return encoded


def _record(
    bundle: Bundle,
    adapter: BundledAdapter,
    prompts: list[tuple[str, list[int]]],
    folder: Path,
    dtype: str,
    device: str | None,
    file: Path | None,
) -> Recording:
    from ss_device.reference.recording import record_traces, recorded_on

    held = [functions.context for functions in (adapter.coreml, adapter.coreai, adapter.mlxfn) if functions]
    settings = RuntimeSettings(dtype=dtype, device=device, context=min(held, default=None))
    model = open_reference(bundle, adapter, settings)
    max_tokens = min(adapter.max_tokens, TRACED_TOKENS)
    for index, (_, ids) in enumerate(prompts):
        with row_errors(file, index):
            check_request(model.limits, adapter.num_nodes, len(ids), max_tokens)
    drafter = Drafter(adapter.num_nodes, bigram_bias=bundle.bigram_bias(adapter))
    origin = replace(
        recorded_on(model),
        base=bundle.manifest.base.sha256,
        weights=bundle.weights_digest(adapter),
    )
    started = time.perf_counter()
    with progress(len(prompts), f"{adapter.app} on {origin.device}") as advance:
        traces = record_traces(model, drafter, prompts, max_tokens, advance)
    seconds = time.perf_counter() - started
    bundle.check_unchanged()
    save_traces(traces, folder / adapter.app, origin)
    return Recording(
        adapter=adapter.app,
        origin=origin,
        prompts=len(traces),
        tokens=sum(len(t.generated) for t in traces),
        calls=sum(1 + len(t.steps) for t in traces),
        seconds=seconds,
    )


def traces_of(
    bundle: Bundle, adapter: BundledAdapter, folder: Path, limit: int | None = None
) -> tuple[list[Trace], Recorded]:
    """An adapter's traces from a folder that `record_bundle` wrote, and where they were made.

    Raises UserError where there are none, and for those of other weights than this bundle's.
    """
    stem = folder / adapter.app
    if not stem.with_suffix(".json").is_file():
        known = sorted(path.stem for path in folder.glob("*.json"))
        raise UserError(f"{folder}: no traces of '{adapter.app}' (found: {', '.join(known) or 'none'})")
    origin = trace_record(stem)
    if origin is None or origin.weights != bundle.weights_digest(adapter):
        raise UserError(
            f"{stem}.json: recorded with other weights than those of '{adapter.app}' in {bundle.path}; "
            "record and replay copies of one bundle"
        )
    return load_traces(stem, bundle.manifest.architecture.vocab_size)[:limit], origin


def why_not_replayed(bundle: Bundle, adapter: BundledAdapter, backend: str) -> str | None:
    """Why recorded traces cannot be compared with a back end; None where they can."""
    if stored_golden(adapter, backend):
        return (
            "its package has compressed weights, which are not those of the recording (the bundle's own "
            "golden traces are made with them)"
        )
    return None


def weights_are_exact(bundle: Bundle, backend: str, origin: Recorded) -> bool:
    """Whether a back end computes with the very weights of a float32 recording, which reads MLX's file."""
    same = backend not in FUNCTION_BACKENDS or bundle.manifest.made.exact_weights
    return same and origin.dtype == "float32"
