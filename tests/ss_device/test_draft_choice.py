"""Drafts as data: the words of `--tree`, the keys of tuning.json, and the trees that both mean."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from ss_device.draft_choice import DraftChoice
from ss_device.errors import UserError
from ss_device.step_model import Proposal

WORDS = {
    "best-first:32": DraftChoice(32),
    "chain:5": DraftChoice(5, "chain"),
    "k-ary:121:2": DraftChoice(121, "k-ary", max_streams=2),
    "best-first+lookup:12:2": DraftChoice(12, "best-first", True, 2),
    "chain+lookup:4": DraftChoice(4, "chain", True),
}


@pytest.mark.parametrize("text", WORDS)
def test_words_are_read_and_written(text):
    choice = DraftChoice.parse(text)
    assert choice == WORDS[text] and str(choice) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("best-first", "not SHAPE:NODES"),
        ("best-first:0", "not SHAPE:NODES"),
        ("best-first:4:", "not SHAPE:NODES"),
        ("best-first:4:2:1", "not SHAPE:NODES"),
        ("chain:-3", "not SHAPE:NODES"),
        ("round:4", "tree shape 'round'"),
        ("+lookup:4", "tree shape ''"),
        ("k-ary+lookup:8", "not a k-ary tree"),
    ],
)
def test_other_words_are_refused(text, says):
    with pytest.raises(UserError, match=says):
        DraftChoice.parse(text)


def test_fields_are_the_keys_of_a_tuning():
    keys = {"num_nodes": 6, "shape": "chain", "lookup": True, "max_streams": 1, "num_kept": 3}
    assert asdict(DraftChoice(6, "chain", True, 1, 3)) == keys


def test_labels():
    assert DraftChoice(1, lookup=True).label() == "plain"
    assert DraftChoice(12, "best-first", True, 2, 8).label() == "12 best-first 2 streams +lookup, 8 kept"


def test_what_a_choice_draws():
    logits = np.zeros((3, 9), np.float32)
    logits[[0, 1, 2], [4, 5, 6]] = 5.0
    drafter = DraftChoice.parse("chain:4:2").drafter(None)
    tree = drafter.grow(Proposal(7, logits), frozenset(), 8, drafter.start([1, 2]))
    assert tree.tokens.tolist() == [7, 4, 5]  # two streams reach two deep
    drafter = DraftChoice.parse("best-first+lookup:3").drafter(None)
    history = drafter.start([1, 8, 3, 1, 8, 3, 1])
    tree = drafter.grow(Proposal(1, np.zeros((0, 9), np.float32)), frozenset(), 8, history)
    assert tree.tokens.tolist() == [1, 8, 3]
