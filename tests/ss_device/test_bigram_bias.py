"""The shared bigram bias: counts by hand, a bigram model that is recovered, files that are refused."""

from __future__ import annotations

import numpy as np
import pytest

from ss_device.errors import UserError
from ss_device.training.bigram_bias import (
    bigram_counts,
    load_bigram_bias,
    save_bigram_bias,
    train_bigram_bias,
)
from ss_device.training.corpus import Document
from ss_device.training.losses import IGNORE, make_batch
from ss_device.training.settings import BigramBiasSettings
from ss_device.tree import BigramBias, log_softmax
from tests.tiny_models import VOCAB, make_tiny_base


def test_counts_only_generated_pairs():
    documents = [Document(np.array([1, 9, 5, 6, 5, 6, 2], np.int32), 2), Document(np.array([1, 5, 2]), 2)]
    pairs, counts = bigram_counts(documents)
    assert pairs.tolist() == [[5, 6], [6, 2], [6, 5]]
    assert counts.tolist() == [2, 1, 1]
    with pytest.raises(UserError, match="two tokens"):
        bigram_counts(documents[1:])


def test_what_a_user_says_between_two_answers_does_not_count():
    chat = Document(np.array([1, 8, 5, 6, 2, 9, 9, 9, 7, 2], np.int32), 2, ((2, 5), (8, 10)))
    pairs, counts = bigram_counts([chat])
    assert pairs.tolist() == [[5, 6], [6, 2], [7, 2]] and counts.tolist() == [1, 1, 1]
    # The pairs that streams learn from: a parent and its target in one span.
    batch = make_batch([chat], 2)
    learnt = {
        (int(parent), int(target))
        for parent, target in zip(batch.parents.flatten(), batch.targets.flatten(), strict=True)
        if target != IGNORE
    }
    assert learnt == set(map(tuple, pairs.tolist()))


def test_a_known_bigram_model_is_recovered():
    rng = np.random.default_rng(0)
    table = rng.dirichlet(np.full(12, 0.5), size=12)
    text = [0]
    for _ in range(20_000):
        text.append(int(rng.choice(12, p=table[text[-1]])))
    tensors = train_bigram_bias([Document(np.array(text, np.int32), 0)], 12, BigramBiasSettings(8, 150))
    bias = BigramBias(tensors["bigram.u"], tensors["bigram.v"])
    found = np.exp([log_softmax(bias(parent)) for parent in range(12)])
    assert np.abs(found - table).max() < 0.06
    assert np.abs(found - table.mean(0)).max() > 0.3  # more than the unigram


def test_files_round_trip_and_wrong_ones_are_refused(tmp_path):
    base = make_tiny_base(tmp_path / "base")
    rng = np.random.default_rng(0)
    tensors = {f"bigram.{n}": rng.normal(size=(VOCAB, 4)).astype(np.float16) for n in "uv"}
    save_bigram_bias(tensors, base.identity, tmp_path / "bias.safetensors")
    loaded, digest = load_bigram_bias(tmp_path / "bias.safetensors", base, 4)
    assert len(digest) == 64
    for name, value in tensors.items():
        np.testing.assert_array_equal(loaded[name], value.astype(np.float32))
    with pytest.raises(UserError, match=r"bigram.u is \(300, 4\), expected shape \(300, 8\)"):
        load_bigram_bias(tmp_path / "bias.safetensors", base, 8)
    with pytest.raises(UserError, match="no such bigram bias"):
        load_bigram_bias(tmp_path / "none.safetensors", base, 4)
