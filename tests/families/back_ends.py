"""The back ends under test, each leaving the main logits of its last step in `last_logits`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch

from ss_convert.graph import functions
from ss_convert.graph.operations import op
from ss_convert.graph.options import PRESETS, GraphOptions
from ss_convert.graph.weights import ExportWeights
from ss_device.adapter import Adapter
from ss_device.base_model import BaseFolder
from ss_device.families import canonical_parts
from ss_device.reference.step_model import ReferenceStepModel
from ss_device.reference.stream_model import StreamModel, attach_adapter, load_base
from ss_runtime.function_step_model import FunctionStepModel
from ss_runtime.mlx.step_model import MLXStepModel
from ss_runtime.settings import RuntimeSettings
from tests.convert.cases import MAKE
from tests.families.checks import CONFIGS, KEPT, NODES, Measured, Truth, measure
from tests.families.tiny import CONTEXT, make_base
from tests.tiny_models import random_adapter

BACK_ENDS = ("reference", "mlx", "executor", "coreai", "coreai gpu", "coreai ane")
TARGETS = {"executor": "coreml", "coreai": "coreai"}


@dataclass(frozen=True)
class Subject:
    """A family in one mode: base, adapter, and Hugging Face's model of it (with PEFT in shared mode)."""

    base: BaseFolder
    adapter: Adapter
    weights: dict[str, np.ndarray]
    stream_model: StreamModel
    truth: Truth

    @property
    def kept(self) -> int:
        return KEPT[self.adapter.config.mode]

    def reference(self) -> ReferenceBackEnd:
        return ReferenceBackEnd(self.stream_model, NODES, self.kept, CONTEXT)

    def changed(self, **changes) -> Subject:
        """The same weights read with a changed architecture; what no longer fits is cut or left out."""
        scaling = self.base.architecture.rope_scaling
        limits = {"long": 0, "short": 1 << 20}
        if (choice := changes.get("rope_scaling")) is not None:
            changes["rope_scaling"] = replace(scaling, original_positions=limits[choice])
        base = replace(self.base, architecture=replace(self.base.architecture, **changes))
        weights = {
            name: self.weights[name][tuple(slice(extent) for extent in shape)]
            for name, shape in base.architecture.weight_shapes().items()
        }
        return replace(self, base=base, weights=weights)


def make_subject(name: str, mode: str, folder: Path) -> Subject:
    base = make_base(name, folder)
    adapter = random_adapter(base, CONFIGS[mode])
    model = attach_adapter(load_base(base), base.architecture, adapter)
    return Subject(base, adapter, base.weights(), model, Truth(model.base))


class ReferenceBackEnd(ReferenceStepModel):
    last_logits: np.ndarray

    def step(self, tree, choose=None):
        verified = super().step(tree, choose)
        self.last_logits = verified.logits
        return verified


class MLXBackEnd(MLXStepModel):
    """Keeps what the decoder's first use of its head in a step gave: the main logits."""

    last_logits: np.ndarray

    def step(self, tree, choose=None, defer=False):
        found, head = [], self.decoder.logits
        self.decoder.logits = lambda x: found.append(head(x)) or found[-1]
        try:
            verified = super().step(tree, choose, defer)
        finally:
            del self.decoder.logits
        self.last_logits = np.array(found[0])
        return verified


def mlx_back_end(subject: Subject, stream_rows: str = "kept") -> MLXBackEnd:
    lora = subject.adapter.lora.items()
    factors = {f"lora.{n}.{f}": t for n, pair in lora for f, t in zip("ab", pair, strict=True)}
    settings = RuntimeSettings(
        num_nodes=NODES,
        num_kept=subject.kept,
        context=CONTEXT,
        dtype="float32",
        stream_rows=stream_rows,
        bucket=16,
    )
    tensors = {**subject.adapter.tensors, **factors}
    return MLXBackEnd(subject.base.architecture, subject.adapter.config, subject.weights, tensors, settings)


class WrittenBackEnd(FunctionStepModel):
    """A written package or asset; its step function has the main logits as one more output."""

    last_logits: np.ndarray

    def step(self, tree, choose=None):
        verified = super().step(tree, choose)
        self.last_logits = np.asarray(self._step_engine.last["logits"], np.float32)
        return verified


class _Remembering:
    """An engine that keeps its last outputs."""

    def __init__(self, engine) -> None:
        self._engine = engine

    def make_state(self):
        return self._engine.make_state()

    def predict(self, inputs, state):
        self.last = self._engine.predict(inputs, state)
        return self.last


def written_back_end(subject: Subject, folder: Path, target: str, preset: str = "none") -> WrittenBackEnd:
    """Convert and open; the builder's step body runs as it is, its head's first product goes out too."""
    original = functions.build_step

    def with_logits(decoder, config, options, tables, inputs):
        found, head = [], decoder.head
        decoder.head = lambda rows: found.append(head(rows)) or found[-1]
        outputs = original(decoder, config, options, tables, inputs)
        return {**outputs, "logits": op.identity(found[0])}

    sizes = {"num_nodes": NODES, "num_kept": subject.kept, "context": CONTEXT, "chunk": 8}
    options = GraphOptions(**sizes, preset=preset, **PRESETS.get(preset, {}))
    base = SimpleNamespace(architecture=subject.base.architecture, weights=lambda: subject.weights)
    with mock.patch.object(functions, "build_step", with_logits):
        model = MAKE[target](base, subject.adapter, options, folder / target / "tiny")
    engines = (model._prefill_engine, _Remembering(model._step_engine))
    return WrittenBackEnd(*engines, model.functions, subject.adapter.config, base.architecture)


def exported(subject: Subject) -> Subject:
    """The subject with its base rounded to fp16, as a package holds it."""
    if not subject.adapter.lora:
        return subject
    base, adapter = subject.base, subject.adapter
    constants = ExportWeights(base.architecture, subject.weights, adapter)
    model = load_base(base)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parts = [constants.base(p.name) for p in canonical_parts(base.architecture, name)]
            parameter.copy_(torch.from_numpy(np.concatenate(parts).astype(np.float32)))
    return replace(subject, stream_model=attach_adapter(model, base.architecture, adapter))


def measure_back_end(name: str, subject: Subject, folder: Path) -> Measured:
    """All checks of the back end `name` (BACK_ENDS), of an asset also by preset."""
    if name == "reference":
        return measure(subject.reference(), subject.truth)
    if name == "mlx":
        return measure(mlx_back_end(subject), subject.truth, subject.reference())
    as_written = exported(subject)
    target, _, preset = name.partition(" ")
    model = written_back_end(subject, folder, TARGETS[target], preset or "none")
    return measure(model, as_written.truth, as_written.reference())
