"""Replayed counts equal those of the decoding loop, for every tree shape; refused where they could not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ss_device.config import SpeculativeConfig, paper_config
from ss_device.decoding import Drafter
from ss_device.errors import UserError
from ss_device.evaluation.acceptance import AcceptanceCounts, measure
from ss_device.evaluation.replay import replay_continuations
from ss_device.evaluation.replay_report import repeats
from ss_device.prompt_lookup import PromptLookup
from ss_device.reference.step_model import ReferenceStepModel
from ss_device.reference.stream_model import load_stream_model
from tests.tiny_models import make_tiny_base, random_adapter

STOP = frozenset({2, 7})
MAX_TOKENS = 14


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_base(tmp_path_factory.mktemp("base"))


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [[1, *rng.integers(3, 200, int(rng.integers(1, 9))).tolist()] for _ in range(count)]


@pytest.mark.parametrize(
    "config",
    [
        SpeculativeConfig(num_streams=3, num_msa_layers=2, bigram_rank=4),
        SpeculativeConfig(
            mode="shared", num_streams=3, num_msa_layers=2, stream_mlp="base", stream_adapter_rank=0,
            lora_rank=2, lora_alpha=4,
        ),
    ],
    ids=["lossless with bigram bias", "shared"],
)  # fmt: skip
def test_counts_equal_the_decoding_loop(base, config):
    adapter = random_adapter(base, config)
    model = load_stream_model(base, adapter)
    bias = adapter.bigram_bias()
    # A vocabulary of 256 and 200 nodes: random drafts are accepted often enough to matter.
    drafters = [
        Drafter(1),
        Drafter(200, "best-first", 3, bias),
        Drafter(6, "chain", 3, bias),
        Drafter(40, "k-ary"),
        Drafter(30, bigram_bias=bias, lookup=PromptLookup(), max_streams=2),
        Drafter(12, lookup=PromptLookup(), use_streams=False),
    ]
    asked = prompts(8)
    step_model = ReferenceStepModel(model, 200)
    expected = [measure(step_model, d, asked, MAX_TOKENS, STOP) for d in drafters]
    outputs = expected[0][1]
    assert all(o == outputs for _, o in expected)
    found = replay_continuations(model, drafters, asked, outputs, STOP, MAX_TOKENS, tokens_per_batch=60)
    for counts, (wanted, _) in zip(found, expected, strict=True):
        merged = AcceptanceCounts()
        for count in counts:
            merged.merge(count)
        assert merged == wanted
    assert sum(sum(count.accepted) for count in found[1]) > 5


def test_a_text_that_says_the_same_eight_tokens_twice_repeats_itself():
    once = list(range(3, 11))
    assert repeats([1, *once, 2, *once]) and repeats([7] * 9)
    assert not repeats([1, *once, 2, *once[:-1]]) and not repeats([7] * 8)


def test_streams_in_the_main_stream_are_refused(base):
    config = dataclasses.replace(paper_config("shared", main_attends_streams=True), num_msa_layers=2)
    model = load_stream_model(base, random_adapter(base, config))
    with pytest.raises(UserError, match="main stream"):
        replay_continuations(model, [Drafter(1)], [[1, 5]], [[6, 2]], STOP, 4)
