"""Texts with several generated spans: where streams sit, what they may learn, what a plan keeps."""

from __future__ import annotations

import numpy as np
import torch

from ss_device.training.batching import collate
from ss_device.training.corpus import Document
from ss_device.training.losses import make_batch

# bos u u | a b eos | u | c eos
IDS = np.array([1, 10, 11, 20, 21, 2, 12, 30, 2], np.int32)
TURNS = Document(IDS, 3, ((3, 6), (7, 9)))


def test_streams_sit_where_the_next_token_is_generated_and_stay_in_their_span():
    batch = make_batch([TURNS], num_streams=2)
    assert batch.rows.tolist() == [[2, 3, 4, 6, 7]]
    assert batch.main_targets.tolist() == [[20, 21, 2, 30, 2]]
    assert batch.targets[0].tolist() == [[21, 2], [2, -100], [-100, -100], [2, -100], [-100, -100]]
    assert batch.parents[0].tolist() == [[20, 21], [21, 0], [0, 0], [30, 0], [0, 0]]


def test_one_span_is_the_plain_document():
    plain, spanned = Document(IDS, 4), Document(IDS, 4, ((4, 9),))
    other = Document(IDS[:6], 2)
    for a, b in zip(
        vars(make_batch([plain, other], 3)).values(),
        vars(make_batch([spanned, other], 3)).values(),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_a_document_without_a_prompt_has_no_position_before_its_first_token():
    batch = make_batch([Document(np.array([5, 6, 7], np.int32), 0)], 1)
    assert batch.rows.tolist() == [[0, 1]] and batch.main_targets.tolist() == [[6, 7]]


def test_loss_weights_of_given_and_generated_tokens():
    ids, weights = collate([TURNS, Document(IDS[:4], 3)], 0, 0.25)
    assert ids[1].tolist() == [1, 10, 11, 20, 0, 0, 0, 0, 0]
    np.testing.assert_allclose(weights[0], [0, 0.25, 0.25, 1, 1, 1, 0.25, 1, 1])
    np.testing.assert_allclose(weights[1], [0, 0.25, 0.25, 1, 0, 0, 0, 0, 0])
