"""How an adapter is trained: optimisation, weights of the losses, how it is computed, when it stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ss_device.command_line import positive
from ss_device.config import SpeculativeConfig
from ss_device.errors import UserError
from ss_device.settings import setting
from ss_device.training.batching import plan_batches
from ss_device.training.corpus import Document

PRECISIONS = ("fp32", "bf16")
PRUNING = ("joint", "after")
QUANTIZATIONS = ("nf4",)
LOSSES = ("ce", "kl")


@dataclass(frozen=True)
class AdapterSchedule:
    """Settings of one training run of an adapter. Linear decay from `learning_rate`.

    main_weight α0, stream_weight αj: None = the mode's own (docs/method.md, Modes); stream j weighs
    stream_weight · depth_decay^(j-1). pruning: the early exit learns `joint`ly, or `after` the other
    parts, which then stay frozen. segment: positions whose streams are in memory at once (0 = all).
    quantize_base: `nf4` or empty. evaluate_every: steps between validations (0 = none); patience:
    validations without improvement before the run stops and keeps its best weights (0 = never). loss:
    streams learn the text's tokens (`ce`) or the main stream's distribution at their targets (`kl`).
    """

    epochs: float = setting(5.0, help="passes over the data")
    tokens_per_batch: int = setting(2048, help="tokens of one optimizer step", parse=positive)
    learning_rate: float = setting(5e-4, help="highest learning rate")
    warmup_steps: int = 20
    seed: int = setting(0, help="of weights and data order")
    checkpoint_minutes: float = setting(5.0, help="time between checkpoints", group="execution")
    main_weight: float | None = setting(None, help="weight of the main stream (α0)", group="objective")
    stream_weight: float | None = setting(None, help="weight of every stream (αj)", group="objective")
    depth_decay: float = setting(1.0, help="stream j weighs αj times this to the j-1", group="objective")
    pruning: str = setting(
        "joint",
        help="joint, or after: freeze all parts of --start and train the early exit alone",
        metavar="PRUNING",
        group="objective",
    )
    segment: int = setting(
        0,
        help="hold the streams of N positions in memory at a time (same gradients)",
        parse=positive,
        group="execution",
    )
    gradient_checkpointing: bool = setting(
        False, help="recompute layers in the backward pass", group="execution"
    )
    precision: str = setting("fp32", help="fp32 or bf16", metavar="PRECISION", group="execution")
    quantize_base: str = setting("", help="quantize the base (CUDA)", metavar="nf4", group="execution")
    evaluate_every: int = setting(
        200, help="validate this often (0: never)", metavar="STEPS", group="objective"
    )
    patience: int = setting(
        0,
        help="stop after N validations without improvement and keep the best weights",
        group="objective",
    )
    loss: str = setting(
        "ce",
        help="ce: streams learn the text; kl: the main stream's distribution",
        metavar="LOSS",
        group="objective",
    )

    def __post_init__(self) -> None:
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("pruning", self.pruning, PRUNING)
        _one_of("loss", self.loss, LOSSES)
        if self.loss == "kl" and self.segment:
            raise UserError("loss 'kl' needs whole texts: a stream's teacher may lie in the next segment")
        _one_of("quantize_base", self.quantize_base, ("", *QUANTIZATIONS))
        for name in ("main_weight", "stream_weight"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UserError(f"{name} {value} must not be negative")
        for name in ("epochs", "learning_rate", "depth_decay"):
            if getattr(self, name) <= 0:
                raise UserError(f"{name} {getattr(self, name)} must be above 0")
        for name in ("segment", "evaluate_every", "patience", "checkpoint_minutes", "warmup_steps"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} {getattr(self, name)} must not be negative")
        if self.patience and not self.evaluate_every:
            raise UserError("patience needs evaluate_every: without validation nothing can be judged")

    @property
    def computes_in_half(self) -> bool:
        """Whether the model runs under bfloat16 autocast: in bf16, and over a base quantized to NF4, whose
        layers are bfloat16 beside trained parts in float32."""
        return self.precision == "bf16" or bool(self.quantize_base)


@dataclass(frozen=True)
class LossWeights:
    """Factors of the loss: main α0, one α per stream, early exit; what streams learn (`LOSSES`)."""

    main: float
    streams: tuple[float, ...]
    early: float
    target: str = "ce"

    @property
    def needs_main(self) -> bool:
        """Whether the loss reads main logits: for the main stream itself, or as the streams' teacher."""
        return self.main > 0 or (self.target == "kl" and any(self.streams))


def loss_weights(config: SpeculativeConfig, schedule: AdapterSchedule) -> LossWeights:
    """The run's weights; where the schedule is silent its mode's (docs/method.md, Modes)."""
    if schedule.pruning == "after":
        return LossWeights(0.0, (0.0,) * config.num_streams, 1.0)
    main, stream = (1.0, 0.1) if config.mode == "shared" else (0.0, 1.0)
    main = main if schedule.main_weight is None else schedule.main_weight
    stream = stream if schedule.stream_weight is None else schedule.stream_weight
    streams = tuple(stream * schedule.depth_decay**j for j in range(config.num_streams))
    return LossWeights(main, streams, 1.0 if config.pruning_rank else 0.0, schedule.loss)


def learning_rate(step: int, steps: int, schedule: AdapterSchedule) -> float:
    """Linear warm-up over `warmup_steps`, then linear decay to zero at `steps`."""
    warm = min(1.0, (step + 1) / max(1, schedule.warmup_steps))
    return schedule.learning_rate * warm * max(0.0, 1 - step / max(1, steps))


def plan_epochs(documents: Sequence[Document], schedule: AdapterSchedule) -> list[list[int]]:
    """Batches of document indices for all epochs, in an order fixed by the seed."""
    rng = np.random.default_rng(schedule.seed)
    plan: list[list[int]] = []
    epochs = []
    while len(epochs) < schedule.epochs:
        order = rng.permutation(len(documents)).tolist()
        lengths = [len(documents[i].ids) for i in order]
        batches = plan_batches(lengths, schedule.tokens_per_batch, rng)
        epochs.append(len(batches))
        plan.extend([order[i] for i in batch] for batch in batches)
    return plan[: max(1, round(schedule.epochs * epochs[0]))]


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{name} '{value}' is not one of {', '.join(a for a in allowed if a)}")
