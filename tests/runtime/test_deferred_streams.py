"""Streams that are put off: the same drafts as in the step, the same text, and the tuner's replay."""

from __future__ import annotations

import numpy as np
import pytest

from ss_device.decoding import Drafter, decode
from ss_device.draft_policy import NUM_CELLS, AdaptiveDrafter, Experience, StepCosts
from ss_device.prompt_lookup import PromptLookup
from ss_device.sampling import Sampler, Sampling
from ss_runtime.bench.tuner import record, replay_recordings
from tests.runtime.mlx_cases import CONFIGS, PROMPT, SHARED, mlx_model, random_tree
from tests.tiny_models import VOCAB, random_adapter

COSTS = StepCosts((1, 8), (0.01, 0.012), 0.003)
SURE = Experience(100.0, ((3.0, 0.011),) * NUM_CELLS)
TOP_KEYS = type(CONFIGS["rich"])(**{**CONFIGS["rich"].to_dict(), "stream_top_keys": 4})


def adaptive(streams="when they pay", bias=None):
    return AdaptiveDrafter(8, COSTS, SURE, bias, streams=streams)


def text(model, drafter, sampler=None):
    return [t for step in decode(model, drafter, PROMPT, 40, sampler=sampler) for t in step.tokens]


@pytest.mark.parametrize("num_kept", [8, 5])
@pytest.mark.parametrize(
    "config", [CONFIGS["paper"], CONFIGS["rich"], TOP_KEYS], ids=["paper", "rich", "top keys"]
)
def test_streams_after_the_commit_are_those_of_the_step(mlx_base, config, num_kept):
    model = mlx_model(
        mlx_base, random_adapter(mlx_base, config), stream_rows="accepted", num_kept=num_kept, bucket=16
    )
    rng = np.random.default_rng(0)
    model.prefill(PROMPT)
    for size in (8, 1, 5):
        tree = random_tree(rng, size, 50, VOCAB)
        at_once, later = model.step(tree), model.step(tree, defer=True)
        assert later.stream_logits.size == 0 and later.chosen.tolist() == at_once.chosen.tolist()
        with pytest.raises(RuntimeError, match="commit"):
            model.streams()
        model.commit(tree.path(later.accepted_node))
        for _ in range(2):  # asking changes nothing
            streams = model.streams()
            scale = np.abs(at_once.stream_logits).max()
            assert np.abs(streams - at_once.stream_logits).max() < 1e-4 * scale
    model.step(random_tree(rng, 3, 50, VOCAB))
    model.commit([0])
    with pytest.raises(RuntimeError, match="deferred streams"):
        model.streams()


def test_a_model_that_cannot_put_streams_off_says_so(mlx_base):
    model = mlx_model(mlx_base, random_adapter(mlx_base, SHARED[True]), stream_rows="kept")
    assert not model.limits.defers_streams
    model.prefill(PROMPT)
    with pytest.raises(ValueError, match="cannot defer streams"):
        model.step(random_tree(np.random.default_rng(0), 3, 50, VOCAB), defer=True)


@pytest.mark.parametrize("rows", ["accepted", "kept", "none"])
@pytest.mark.parametrize("streams", ["when they pay", "always", "never"])
def test_adaptive_drafts_do_not_change_the_text(mlx_base, rows, streams):
    adapter = random_adapter(mlx_base, CONFIGS["rich"])
    model = mlx_model(mlx_base, adapter, stream_rows=rows)
    drafter = adaptive(streams, adapter.bigram_bias())
    plain = text(model, Drafter(1))
    assert text(model, drafter) == text(model, drafter) == plain
    sampler = Sampler(Sampling(temperature=1.0, seed=5))
    assert text(model, drafter, sampler) == text(model, Drafter(1), sampler) != plain


def test_a_replayed_recording_takes_as_many_calls_as_the_model(mlx_base):
    adapter = random_adapter(mlx_base, CONFIGS["rich"])
    model = mlx_model(mlx_base, adapter, stream_rows="accepted")
    stops = frozenset({2})
    recording = record(model, PROMPT, 40, stops)
    bias = adapter.bigram_bias()
    for make in (
        lambda: Drafter(1),
        lambda: Drafter(6, bigram_bias=bias, lookup=PromptLookup()),
        lambda: adaptive("always", bias),
    ):
        steps = list(decode(model, make(), PROMPT, 40, stops))
        assert [t for step in steps for t in step.tokens] == recording.tokens
        per_call, seconds, _ = replay_recordings(make(), [recording], COSTS, stops)
        assert per_call == pytest.approx((len(recording.tokens) - 1) / (len(steps) - 1))
        assert seconds >= COSTS.seconds[0]
