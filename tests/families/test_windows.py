"""Sliding windows at their edge: drafts that reach across it, commits across it, texts far longer.

A row at position p of a layer with window W sees the keys at positions above p − W, so position W is the
first that no longer sees all. `test_families` starts behind that edge; these tests start before it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from ss_device.tree import tree_from_parents
from tests.convert.cases import NEEDS_COREAI
from tests.families.back_ends import TARGETS, exported, make_subject, mlx_back_end, written_back_end
from tests.families.checks import (
    GENERATED,
    NODES,
    TOLERANCE,
    Truth,
    generated,
    random_tree,
    relative,
)

# Windows on every layer, on the upper ones, on every second, on all but each sixth.
WINDOWED = ("mistral", "qwen2", "phi3", "gemma2", "gemma3_text")
CASES = [(name, back_end) for name in WINDOWED for back_end in ("reference", "mlx", "mlx, second pass")]
CASES += [("mistral", "executor"), ("gemma2", "executor")]
CASES += [pytest.param(name, "coreai", marks=NEEDS_COREAI) for name in ("mistral", "gemma2")]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """(family, back end) → its step model, what Hugging Face says from two tokens before the edge, W."""

    @cache
    def subject(name):
        return make_subject(name, "lossless", tmp_path_factory.mktemp(name))

    def written(found, back_end):
        return written_back_end(found, tmp_path_factory.mktemp("written"), TARGETS[back_end])

    @cache
    def open_model(name, back_end):
        found = subject(name)
        if back_end in TARGETS:
            found = exported(found)
        window = min(w for w in found.base.architecture.windows if w)
        model = {
            "reference": found.reference,
            "mlx": lambda: mlx_back_end(found),
            "mlx, second pass": lambda: mlx_back_end(found, "accepted"),
            **{name: partial(written, found, name) for name in TARGETS},
        }[back_end]()
        return model, Truth(found.stream_model.base, window - 2), window

    return open_model


def difference(model, truth: Truth, at: int, tree) -> float:
    verified = model.step(tree)
    logits = model.last_logits[: len(verified.kept)]
    return relative(logits, truth.logits(at, tree)[verified.kept])


def true_chain(truth: Truth):
    return tree_from_parents(truth.text[:NODES], list(range(-1, NODES - 1)))


@pytest.mark.parametrize(("name", "back_end"), CASES)
def test_a_draft_reaches_across_the_edge(opened, name, back_end):
    model, truth, window = opened(name, back_end)
    assert len(truth.prompt) < window < len(truth.prompt) + NODES
    for tree in (true_chain(truth), random_tree(np.random.default_rng(3), "random", truth.text)):
        model.prefill(truth.prompt)
        assert difference(model, truth, 0, tree) <= TOLERANCE


@pytest.mark.parametrize(("name", "back_end"), CASES)
@pytest.mark.parametrize("length", [2, 3, NODES])
def test_a_commit_goes_across_the_edge(opened, name, back_end, length):
    """Up to the position before the edge, to the edge, and past it; then drafts behind."""
    model, truth, window = opened(name, back_end)
    model.prefill(truth.prompt)
    verified = model.step(true_chain(truth))
    assert verified.accepted_node == NODES - 1
    model.commit(list(range(length)))
    assert len(truth.prompt) + length - window in (0, 1, NODES - 2)
    for shape in ("bushy", "chain"):
        tree = random_tree(np.random.default_rng(4), shape, truth.text[length:])
        assert difference(model, truth, length, tree) <= TOLERANCE


@pytest.mark.parametrize(("name", "back_end"), CASES)
def test_a_text_outgrows_the_window(opened, name, back_end):
    model, truth, window = opened(name, back_end)
    assert len(truth.prompt) + GENERATED > 2 * window
    assert generated(model, truth.prompt, truth.text) == truth.text


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_off_by_one_is_noticed_at_its_edge(opened, tmp_path, name, off):
    _, truth, window = opened(name, "mlx")
    right = make_subject(name, "lossless", tmp_path)
    shape = right.base.architecture
    windows = tuple(w and w + off for w in shape.windows)
    wrong = mlx_back_end(
        replace(right, base=replace(right.base, architecture=replace(shape, windows=windows)))
    )
    wrong.prefill(truth.prompt)
    assert difference(wrong, truth, 0, true_chain(truth)) > TOLERANCE
