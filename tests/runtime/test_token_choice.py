"""Sampling and penalties on MLX and the reference: the same text with drafts and without."""

from __future__ import annotations

import numpy as np
import pytest

from ss_device.decoding import Drafter, decode
from ss_device.errors import UserError
from ss_device.prompt_lookup import PromptLookup
from ss_device.reference.step_model import ReferenceStepModel
from ss_device.reference.stream_model import attach_adapter
from ss_runtime.token_choice import make_chooser, penalty_processors
from tests.runtime.mlx_cases import CONFIGS, PROMPT, SHARED, mlx_model
from tests.tiny_models import random_adapter


def text_of(model, drafter, chooser):
    return [t for step in decode(model, drafter, PROMPT, 14, chooser=chooser) for t in step.tokens]


@pytest.mark.parametrize(("rows", "num_kept"), [("kept", 5), ("accepted", 8)])
def test_seeded_text_is_the_plain_one_on_both_back_ends(mlx_base, hugging_face, rows, num_kept):
    adapter = random_adapter(mlx_base, CONFIGS["paper"])
    mlx = mlx_model(mlx_base, adapter, stream_rows=rows, num_kept=num_kept)
    reference = ReferenceStepModel(
        attach_adapter(hugging_face, mlx_base.architecture, adapter), 8, num_kept
    )
    for seed in range(2):
        chooser = make_chooser(0.7, {"seed": seed, "top_p": 0.9}, {"repetition": 1.3})
        plain = text_of(mlx, Drafter(1), chooser)
        assert text_of(mlx, Drafter(8), chooser) == plain
        assert text_of(mlx, Drafter(8, lookup=PromptLookup()), chooser) == plain
        assert text_of(reference, Drafter(8), chooser) == plain
    assert text_of(mlx, Drafter(8), None) == text_of(mlx, Drafter(1), None) != plain


def test_streams_that_the_main_stream_sees(mlx_base):
    model = mlx_model(mlx_base, random_adapter(mlx_base, SHARED[True]))
    chooser = make_chooser(0.9, {"seed": 3})
    assert text_of(model, Drafter(8), chooser) == text_of(model, Drafter(1), chooser)


def test_penalties_by_hand():
    logits = np.array([2.0, -2.0, 1.0, 0.5], np.float32)
    (repetition,) = penalty_processors({"repetition": 2.0, "presence": None})
    np.testing.assert_allclose(repetition([0, 1, 0], logits), [1.0, -4.0, 1.0, 0.5])
    (presence,) = penalty_processors({"presence": 0.5})
    np.testing.assert_allclose(presence([0, 0, 3], logits), [1.5, -2.0, 1.0, 0.0])
    assert logits.tolist() == [2.0, -2.0, 1.0, 0.5]


def test_greedy_needs_no_chooser_and_takes_penalties():
    assert make_chooser(0.0, {}) is None
    assert make_chooser(0.0, {"seed": 4}) is None
    assert make_chooser(0.0, {}, {"presence": 5.0})(np.array([3.0, 1.0], np.float32), [0], ()) == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((-1.0, {}), "temperature"),
        ((0.0, {"top_p": 0.5}), "top-p needs"),
        ((0.0, {}, {}, 0.3), "typical acceptance needs"),
        ((1.0, {"top_p": 2.0}), "top-p"),
        ((1.0, {}, {"repetition": -1.0}), "repetition penalty"),
        ((1.0, {}, {}, 3.0), "epsilon"),
    ],
)
def test_bad_values(arguments, word):
    with pytest.raises(UserError, match=word):
        make_chooser(*arguments)
