"""Sampling and penalties on MLX and the reference: the same text with drafts and without."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import load, stream_generate
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from ss_device.decoding import Drafter, decode
from ss_device.errors import UserError
from ss_device.prompt_lookup import PromptLookup
from ss_device.reference.step_model import ReferenceStepModel
from ss_device.reference.stream_model import attach_adapter
from ss_runtime.bench.methods import _old_rope_names
from ss_runtime.generation import lossy_epsilon
from ss_runtime.samplers import MLXLMSampler, build_sampler, penalty_processors
from tests.runtime.mlx_cases import CONFIGS, PROMPT, SHARED, mlx_model
from tests.ss_device.test_sampled_decoding import LENGTH, VOCAB, Markov, texts
from tests.tiny_models import random_adapter


def text_of(model, drafter, sampler):
    return [t for step in decode(model, drafter, PROMPT, 14, sampler=sampler) for t in step.tokens]


@pytest.mark.parametrize(("rows", "num_kept"), [("kept", 5), ("accepted", 8)])
def test_seeded_text_is_the_plain_one_on_both_back_ends(mlx_base, hugging_face, rows, num_kept):
    adapter = random_adapter(mlx_base, CONFIGS["paper"])
    mlx = mlx_model(mlx_base, adapter, stream_rows=rows, num_kept=num_kept)
    reference = ReferenceStepModel(
        attach_adapter(hugging_face, mlx_base.architecture, adapter), 8, num_kept
    )
    for seed in range(2):
        sampler = build_sampler(0.7, {"seed": seed, "top_p": 0.9}, {"repetition": 1.3})
        plain = text_of(mlx, Drafter(1), sampler)
        assert text_of(mlx, Drafter(8), sampler) == plain
        assert text_of(mlx, Drafter(8, lookup=PromptLookup()), sampler) == plain
        assert text_of(reference, Drafter(8), sampler) == plain
    assert text_of(mlx, Drafter(8), None) == text_of(mlx, Drafter(1), None) != plain


def test_streams_that_the_main_stream_sees(mlx_base):
    model = mlx_model(mlx_base, random_adapter(mlx_base, SHARED[True]))
    sampler = build_sampler(0.9, {"seed": 3})
    assert text_of(model, Drafter(8), sampler) == text_of(model, Drafter(1), sampler)


def test_penalties_by_hand():
    logits = np.array([2.0, -2.0, 1.0, 0.5], np.float32)
    (repetition,) = penalty_processors({"repetition": 2.0, "presence": None})
    np.testing.assert_allclose(repetition([0, 1, 0], logits), [1.0, -4.0, 1.0, 0.5])
    (presence,) = penalty_processors({"presence": 0.5})
    np.testing.assert_allclose(presence([0, 0, 3], logits), [1.5, -2.0, 1.0, 0.0])
    assert logits.tolist() == [2.0, -2.0, 1.0, 0.5]


def test_mlx_lms_greedy_parts_give_the_plain_text(mlx_base):
    """Its processors and its argmax, with drafts and without, against our own penalties."""
    model = mlx_model(mlx_base, random_adapter(mlx_base, CONFIGS["paper"]))
    processors = tuple(make_logits_processors(repetition_penalty=1.4, presence_penalty=0.5))
    for given in (None, make_sampler(0.0)):
        sampler = MLXLMSampler(given, processors)
        plain = text_of(model, Drafter(1), sampler)
        assert text_of(model, Drafter(8), sampler) == plain
        ours = build_sampler(0.0, {}, {"repetition": 1.4, "presence": 0.5})
        assert text_of(model, Drafter(8), ours) == plain
    assert text_of(model, Drafter(8), MLXLMSampler()) == text_of(model, Drafter(1), None) != plain


@pytest.mark.parametrize("length", [1, 7, 30])
@pytest.mark.parametrize(
    "penalties",
    [{"repetition": 1.3}, {"presence": 0.7}, {"frequency": 0.4}, {"repetition": 1.2, "frequency": 0.3}],
)
def test_penalised_text_is_mlx_lms_own(mlx_base, length, penalties):
    """`stream_generate` on its own model; prompts shorter and longer than the 20 tokens that count."""
    model, tokenizer = load(str(mlx_base.path), model_config=_old_rope_names(mlx_base.path))
    model.set_dtype(mx.float32)
    tokenizer.eos_token_ids = set()
    prompt = (PROMPT * 3)[:length]
    processors = make_logits_processors(**{f"{name}_penalty": value for name, value in penalties.items()})
    wanted, plain = (
        [
            response.token
            for response in stream_generate(model, tokenizer, prompt, max_tokens=40, logits_processors=used)
        ]
        for used in (processors, [])
    )
    ours = mlx_model(mlx_base, random_adapter(mlx_base, CONFIGS["paper"]))
    sampler = build_sampler(0.0, {}, penalties)
    for drafter in (Drafter(1), Drafter(8, lookup=PromptLookup())):
        steps = decode(ours, drafter, prompt, 40, sampler=sampler)
        assert [token for step in steps for token in step.tokens] == wanted != plain


def filtered(logits, temperature, top_k):
    """Probabilities [V] of the k likeliest tokens, written out by hand."""
    weights = np.exp(logits.astype(np.float64) / temperature)
    weights[np.argsort(-logits)[top_k:]] = 0
    return weights / weights.sum()


def test_mlx_lms_sampler_keeps_its_distribution_with_drafts():
    """Chi-square over all texts of three tokens; mlx-lm's temperature and top-k, drafts of 8 nodes."""
    model, count = Markov(), 1500
    expected = {(): 1.0}
    for _ in range(LENGTH):
        expected = {
            (*text, token): p * q
            for text, p in expected.items()
            for token, q in enumerate(filtered(model.table[text[-1] if text else 0], 0.8, 3))
            if q > 0
        }
    mx.random.seed(3)
    sampler = MLXLMSampler(make_sampler(0.8, top_k=3))
    seen = Counter(texts(model, Drafter(8), lambda number: sampler, count))
    assert set(seen) <= set(expected)
    wanted = np.array([p * count for p in expected.values()])
    observed = np.array([seen[text] for text in expected])
    large = wanted >= 5
    cells = np.append(wanted[large], wanted[~large].sum() + 1e-9)
    found = np.append(observed[large], observed[~large].sum())
    statistic = ((found - cells) ** 2 / np.maximum(cells, 1)).sum()
    freedom = len(cells) - 1
    # Wilson and Hilferty's approximation of the chi-square quantile, z = 3.29.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.29 * np.sqrt(2 / (9 * freedom))) ** 3


def test_mlx_lms_processors_see_each_nodes_own_text():
    seen = []

    def look(tokens, logits):
        seen.append(tuple(tokens.tolist()))
        return mx.where(mx.arange(VOCAB) == tokens[-1], -mx.inf, logits)

    found = set()
    for drafter in (Drafter(1), Drafter(8)):
        (text,) = texts(Markov(), drafter, lambda number: MLXLMSampler(None, (look,)), 1)
        text = (0, *text)
        assert seen and all(t == text[: len(t)] for t in seen if len(t) <= len(text))
        found.add(text)
        seen.clear()
    assert len(found) == 1


def test_a_lossy_choice_is_named():
    assert lossy_epsilon(build_sampler(1.0, {}, {}, 0.3)) == 0.3
    assert lossy_epsilon(build_sampler(1.0, {})) is lossy_epsilon(None) is None
    assert lossy_epsilon(MLXLMSampler()) is None


def test_greedy_needs_no_sampler_and_takes_penalties():
    assert build_sampler(0.0, {}) is None
    assert build_sampler(0.0, {"seed": 4}) is None
    assert build_sampler(0.0, {}, {"presence": 5.0})(np.array([3.0, 1.0], np.float32), [0]) == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((-1.0, {}), "temperature"),
        ((float("nan"), {}), "temperature nan"),
        ((float("inf"), {}), "temperature inf"),
        ((0.0, {}, {"presence": float("nan")}), "presence penalty nan"),
        ((0.0, {"top_p": 0.5}), "top-p needs"),
        ((0.0, {}, {}, 0.3), "typical acceptance needs"),
        ((1.0, {"top_p": 2.0}), "top-p"),
        ((1.0, {}, {"repetition": -1.0}), "repetition penalty"),
        ((1.0, {}, {}, 3.0), "epsilon"),
    ],
)
def test_bad_values(arguments, word):
    with pytest.raises(UserError, match=word):
        build_sampler(*arguments)
