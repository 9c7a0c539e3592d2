"""What makes a replay pass: numbers that were compared, finite, and margins that explain differences."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from ss_device.errors import UserError
from ss_device.step_model import Proposal, StepLimits, Verified
from ss_runtime.validation import ReplayOutcome, replay_traces
from tests.ss_device.test_token_ids import make_trace


class Reciting:
    """A back end that does what a trace says, but for `changes` of every step."""

    def __init__(self, trace, proposal=None, **changes):
        self.limits = StepLimits(8, 8, 2, 20, vocab_size=30)
        self._trace, self._changes, self._proposal = trace, changes, proposal

    def prefill(self, tokens):
        self._next = iter(self._trace.steps)
        logits = np.zeros((2, 30), np.float32) if self._proposal is None else self._proposal
        return Proposal(self._trace.generated[0], logits)

    def step(self, tree):
        recorded = next(self._next)
        logits = np.zeros((2, 30), np.float32)
        np.put_along_axis(logits, recorded.probe_ids, recorded.probe_logits, axis=-1)
        said = Verified(recorded.kept, recorded.chosen, recorded.path[-1], logits)
        changes = {n: c(said) if callable(c) else c for n, c in self._changes.items()}
        return replace(said, **changes)

    def commit(self, path):
        pass


def outcome(dtype="float16", trace=None, **changes) -> ReplayOutcome:
    trace = trace or make_trace()
    return replay_traces(Reciting(trace, **changes), [trace], ReplayOutcome("fake", dtype))


def strict_json(found: ReplayOutcome) -> dict:
    return json.loads(json.dumps(found.to_dict(), allow_nan=False))


def test_what_agrees_passes():
    found = outcome("float32")
    assert found.failures == []
    assert (found.prompts, found.steps, found.nodes, found.stream_steps) == (1, 2, 4, 2)
    assert strict_json(found)["max_logit_difference"] == 0.0


@pytest.mark.parametrize("traces", [[], [replace(make_trace(), steps=(), generated=(4,))]])
def test_nothing_compared_is_a_failure(traces):
    found = ReplayOutcome("fake", "float16")
    replay_traces(Reciting(make_trace()), traces, found)
    assert found.compared_nothing and "nothing to go by" in found.failures[0]
    assert strict_json(found)["max_logit_difference"] is None and not strict_json(found)["passed"]


def nan_like(said):
    return np.full_like(said.stream_logits, np.nan)


def one_nan(said):
    """Not at a probe."""
    logits = said.stream_logits.copy()
    logits[1, 29] = np.nan
    return logits


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stream_logits": nan_like}, "not finite"),
        ({"stream_logits": lambda s: s.stream_logits + np.inf}, "not finite"),
        ({"stream_logits": one_nan}, "logits of 2 calls are not finite"),
        ({"logits": np.full((3, 30), np.nan)}, "not finite"),
        ({"proposal": np.full((2, 30), np.nan)}, "logits of 1 calls are not finite"),
        ({"accepted_node": 0}, "accepted nodes are not where"),
        ({"kept": np.zeros(0, np.int32), "chosen": np.zeros(0, np.int32)}, "nothing to go by"),
        (
            {"kept": np.array([0]), "chosen": lambda s: s.chosen[:1], "accepted_node": 0},
            "kept nodes differ",
        ),
    ],
)
def test_damage_does_not_pass_in_half_precision(changes, says):
    found = outcome(**changes)
    assert any(says in failure for failure in found.failures), found.failures
    assert not strict_json(found)["passed"]


@pytest.mark.parametrize("margin", [-1.0, -1e-9, float("nan"), float("inf"), 0.5])
def test_only_a_real_small_margin_explains_another_choice(margin):
    """The second step's last node is on nobody's path."""
    trace = make_trace()
    last = replace(trace.steps[1], margins=np.array([1, 1, margin], np.float32))
    trace = replace(trace, steps=(trace.steps[0], last))

    def other(said):
        return np.where(np.arange(len(said.chosen)) == 2, 25, said.chosen)

    def rounded(said):
        return said.stream_logits * 1.01

    found = outcome(trace=trace, chosen=other, stream_logits=rounded)
    assert found.near_ties == 0 and found.failures == ["1 choices differ by more than rounding"]
    assert strict_json(found)["differences"][0]["near_tie"] is False
    small = replace(last, margins=np.array([1, 1, 0.01], np.float32))
    trace = replace(trace, steps=(trace.steps[0], small))
    found = outcome(trace=trace, chosen=other, stream_logits=rounded)
    assert found.near_ties == 1 and found.failures == []


def test_infinite_probes_make_no_room_for_differences():
    trace = make_trace()
    steps = tuple(replace(s, probe_logits=np.full((2, 2), np.inf, np.float32)) for s in trace.steps)
    found = outcome(trace=replace(trace, steps=steps), stream_logits=np.zeros((2, 30), np.float32))
    assert not found.near_tie_limit and any("stream logits differ" in f for f in found.failures)
    assert strict_json(found)["logit_limit"] is None


def test_traces_with_other_streams_are_another_adapters():
    trace = make_trace()
    steps = tuple(
        replace(s, probe_ids=s.probe_ids[:1], probe_logits=s.probe_logits[:1]) for s in trace.steps
    )
    with pytest.raises(UserError, match="recorded with 1 streams, this back end has 2"):
        outcome(trace=replace(trace, steps=steps))
