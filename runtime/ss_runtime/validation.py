"""Replaying golden traces on a back end: does it choose what the PyTorch reference chose?

Every recorded tree is fed as it was and the recorded path committed (teacher forcing), so one differing
token does not hide what comes after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from ss_device.acceptance import walk
from ss_device.bundle import Bundle, BundledAdapter
from ss_device.errors import UserError
from ss_device.step_model import StepModel, Verified
from ss_device.trace import Recorded, Trace, TraceStep
from ss_runtime.settings import functions_of


@dataclass(frozen=True)
class Tolerance:
    """What rounding may explain, as shares of the largest logit among the reference's probes.

    near_tie: cap on the reference's top-1/top-2 margin of a differing choice; logits: largest difference
    of a stream logit. float16 has a relative step of 5e-4; a stack of layers adds up some tens of them.
    """

    near_tie: float
    logits: float


# Nodes that another dtype may prune where the reference kept them, as a share of those it kept: near
# ties among early-exit scores. A tiny random model in float16 drops none of 266.
DROPPED_SHARE = 0.1

TOLERANCES = {
    "float32": Tolerance(near_tie=1e-4, logits=1e-3),
    "float16": Tolerance(near_tie=2e-2, logits=5e-2),
}


@dataclass(frozen=True)
class Difference:
    """A node where the back end chose another token than the reference.

    step 0 is the prefill; position: index in the text (prompt included) of the token in question;
    margin: the reference's top-1 minus top-2 logit there.
    """

    prompt: int
    step: int
    node: int
    position: int
    expected: int
    chosen: int
    margin: float
    on_path: bool


@dataclass
class ReplayOutcome:
    """What a replay found.

    nodes: choices compared; stream_steps: steps whose stream logits were compared; dropped_nodes: nodes the
    reference kept and the back end pruned away; broken_off: prompts whose accepted path was among them;
    not_finite: calls with logits that are not finite; wrong_walks: steps whose accepted node is not where
    the back end's own choices lead; exact_weights: whether the back end's weights are the reference's;
    origin: where the traces were made.
    """

    backend: str
    dtype: str
    exact_weights: bool = True
    origin: Recorded | None = None
    prompts: int = 0
    token_exact: int = 0
    steps: int = 0
    nodes: int = 0
    stream_steps: int = 0
    dropped_nodes: int = 0
    not_finite: int = 0
    wrong_walks: int = 0
    max_logit_difference: float = 0.0
    largest_logit: float = 1.0
    differences: list[Difference] = field(default_factory=list)
    broken_off: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tolerance(self) -> Tolerance:
        return TOLERANCES[self.dtype if self.exact_weights else "float16"]

    @property
    def is_exact(self) -> bool:
        """Whether nothing but float32 rounding is between this back end and the reference."""
        return self.dtype == "float32" and self.exact_weights

    @property
    def near_tie_limit(self) -> float:
        """A differing choice is a near tie up to this margin: twice the observed logit difference,
        since both of the tokens' logits may have moved by it, capped per dtype. 0 where a number
        is not finite: nothing is explained then."""
        limits = 2 * self.max_logit_difference, self.tolerance.near_tie * self.largest_logit
        return min(limits) if np.isfinite(limits).all() else 0.0

    def is_near_tie(self, difference: Difference) -> bool:
        """Whether rounding explains a differing choice: by a margin that is one, and small."""
        return 0 <= difference.margin <= self.near_tie_limit

    @property
    def near_ties(self) -> int:
        return sum(self.is_near_tie(d) for d in self.differences)

    @property
    def compared_nothing(self) -> bool:
        """Whether choices or stream logits were not compared once."""
        return not (self.prompts and self.steps and self.nodes and self.stream_steps)

    @property
    def failures(self) -> list[str]:
        """Why this replay does not pass; empty when it does."""
        found = []
        if self.compared_nothing:
            found.append(
                f"nothing to go by: {self.prompts} prompts, {self.steps} steps, {self.nodes} choices and "
                f"the stream logits of {self.stream_steps} steps were compared"
            )
        if self.not_finite:
            found.append(f"logits of {self.not_finite} calls are not finite")
        if self.wrong_walks:
            found.append(f"{self.wrong_walks} accepted nodes are not where the chosen tokens lead")
        if other := len(self.differences) - self.near_ties:
            found.append(f"{other} choices differ by more than rounding")
        limit = self.tolerance.logits * self.largest_logit
        if not (self.max_logit_difference <= limit and np.isfinite(limit)):
            found.append(f"stream logits differ by {self.max_logit_difference:.3g} (limit {limit:.3g})")
        may_drop = 0 if self.is_exact else DROPPED_SHARE * (self.nodes + self.dropped_nodes)
        if self.dropped_nodes > may_drop:
            found.append(f"{self.dropped_nodes} kept nodes differ")
        if self.is_exact and self.broken_off:
            found.append(f"the accepted path was pruned away in {len(self.broken_off)} prompts")
        return found

    def to_dict(self) -> dict:
        """JSON form, with every difference. A number is null where there is none: nothing was compared, or
        a logit is not finite (`failures` says which)."""
        compared = self.stream_steps > 0
        return {
            "backend": self.backend,
            "dtype": self.dtype,
            "exact_weights": self.exact_weights,
            "recorded": self.origin and asdict(self.origin),
            "prompts": self.prompts,
            "token_exact": self.token_exact,
            "steps": self.steps,
            "nodes": self.nodes,
            "stream_steps": self.stream_steps,
            "dropped_nodes": self.dropped_nodes,
            "not_finite": self.not_finite,
            "wrong_walks": self.wrong_walks,
            "broken_off": self.broken_off,
            "max_logit_difference": _finite(self.max_logit_difference) if compared else None,
            "near_tie_limit": self.near_tie_limit,
            "logit_limit": _finite(self.tolerance.logits * self.largest_logit),
            "differences": [
                {**asdict(d), "margin": _finite(d.margin), "near_tie": self.is_near_tie(d)}
                for d in self.differences
            ],
            "failures": self.failures,
            "passed": not self.failures,
            "seconds": round(self.seconds, 2),
        }


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if np.isfinite(value) else None


def stored_golden(adapter: BundledAdapter, backend: str) -> str | None:
    """Traces with the weights as the package or asset of a back end stores them, if they are compressed."""
    functions = functions_of(backend, adapter)
    return None if functions is None else functions.golden


def golden_of(adapter: BundledAdapter, backend: str) -> str | None:
    """The traces that a back end is held to: compressed weights have their own."""
    return stored_golden(adapter, backend) or adapter.golden


def has_exact_weights(bundle: Bundle, adapter: BundledAdapter, backend: str) -> bool:
    """Whether a back end computes with the very weights that the reference recorded with.

    Not so when base or adapter were rounded to float16. Traces of a compressed package were recorded
    with what the package holds.
    """
    if stored_golden(adapter, backend):
        return True
    return bundle.manifest.made.exact_weights


def replay_traces(
    model: StepModel,
    traces: Sequence[Trace],
    found: ReplayOutcome,
    max_steps: int | None = None,
    advance: Callable[[str], None] = lambda text: None,
) -> ReplayOutcome:
    """Feed `traces` to `model`, add what differs to `found` and return it.

    Raises UserError when a trace does not fit the model (more nodes or a longer text than it takes).
    """
    for index, trace in enumerate(traces):
        _check_fits(model, trace, index)
        before = len(found.differences)
        whole = _replay_prompt(model, index, trace, found, max_steps)
        found.prompts += 1
        found.token_exact += whole and not any(d.on_path for d in found.differences[before:])
        advance(found.backend)
    return found


def _check_fits(model: StepModel, trace: Trace, index: int) -> None:
    nodes = max((s.tree.num_nodes for s in trace.steps), default=1)
    length = len(trace.prompt) + len(trace.generated) - 1
    streams = {len(s.probe_ids) for s in trace.steps}
    if streams - {model.limits.num_streams}:
        raise UserError(
            f"golden prompt {index} was recorded with {max(streams)} streams, this back end has "
            f"{model.limits.num_streams}: traces of another adapter?"
        )
    if nodes > model.limits.num_nodes:
        raise UserError(
            f"golden prompt {index} has trees of {nodes} nodes, this back end takes "
            f"{model.limits.num_nodes}"
        )
    if length > model.limits.context:
        raise UserError(
            f"golden prompt {index} needs {length} positions, this back end holds {model.limits.context}"
        )


def _replay_prompt(
    model: StepModel, index: int, trace: Trace, found: ReplayOutcome, max_steps: int | None
) -> bool:
    """One prompt; False when the back end pruned the recorded path away and cannot go on."""
    proposal = model.prefill(list(trace.prompt))
    length = len(trace.prompt)
    found.not_finite += not np.isfinite(proposal.stream_logits).all()
    if proposal.root != trace.generated[0]:
        found.differences.append(
            Difference(index, 0, 0, length, trace.generated[0], proposal.root, trace.first_margin, True)
        )
    for number, step in enumerate(trace.steps[:max_steps], 1):
        verified = model.step(step.tree)
        _check_outcome(step, verified, found)
        _compare_nodes(index, number, length, step, verified, found)
        _compare_streams(step, verified, found)
        found.steps += 1
        if not np.all(np.isin(step.path, verified.kept)):
            found.broken_off.append(index)
            return False
        model.commit(step.path)
        length += len(step.path)
    return True


def _check_outcome(step: TraceStep, verified: Verified, found: ReplayOutcome) -> None:
    """What must hold of a step whatever the reference did: finite logits, and the walk that they give."""
    logits = () if verified.logits is None else verified.logits
    found.not_finite += not (np.isfinite(verified.stream_logits).all() and np.isfinite(logits).all())
    path = walk(step.tree, verified.kept, verified.chosen) if 0 in verified.kept else [-1]
    found.wrong_walks += path[-1] != verified.accepted_node


def _compare_nodes(
    index: int, number: int, length: int, step: TraceStep, verified: Verified, found: ReplayOutcome
) -> None:
    chosen = dict(zip(verified.kept.tolist(), verified.chosen.tolist(), strict=True))
    for node, expected, margin in zip(
        step.kept.tolist(), step.chosen.tolist(), step.margins.tolist(), strict=True
    ):
        if node not in chosen:
            found.dropped_nodes += 1
            continue
        found.nodes += 1
        if chosen[node] != expected:
            position = length + int(step.tree.depths[node]) + 1
            found.differences.append(
                Difference(index, number, node, position, expected, chosen[node], margin, node in step.path)
            )


def _compare_streams(step: TraceStep, verified: Verified, found: ReplayOutcome) -> None:
    """Stream logits at the probes, when both accepted the same node."""
    if verified.accepted_node != step.path[-1]:
        return
    values = np.take_along_axis(np.asarray(verified.stream_logits, np.float32), step.probe_ids, axis=-1)
    found.stream_steps += 1
    difference = float(np.max(np.abs(values - step.probe_logits)))
    # np.maximum keeps a NaN, max() would drop it.
    found.max_logit_difference = float(np.maximum(found.max_logit_difference, difference))
    found.largest_logit = float(np.maximum(found.largest_logit, np.max(np.abs(step.probe_logits))))
