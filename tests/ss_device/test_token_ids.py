"""Ids outside the vocabulary: refused before anything looks them up, wherever they come from."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest

from ss_device.architecture import Architecture
from ss_device.decoding import Drafter, decode
from ss_device.errors import UserError
from ss_device.families import read_architecture
from ss_device.step_checks import check_prompt, check_tree, kept_rows
from ss_device.step_model import StepLimits
from ss_device.token_ids import check_token_ids
from ss_device.trace import Trace, TraceStep, load_traces, save_traces
from ss_device.tree import DraftTree, root_only, tree_from_parents

CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
LIMITS = StepLimits(num_nodes=4, num_kept=4, num_streams=2, context=8, vocab_size=300)


@pytest.mark.parametrize("bad", [300, -1, 2**40, 2**70, 1.0, "1", None])
def test_what_is_no_token_id_is_named(bad):
    with pytest.raises(UserError, match=r"the prompt: token id .* outside .* 300 tokens \(0 to 299\)"):
        check_token_ids([1, bad, 2], 300, "the prompt")
    for fine in ([], [0, 299], np.array([0, 299]), (np.int64(7),)):
        check_token_ids(fine, 300, "the prompt")


def test_bos_must_have_a_row_and_eos_may_have_none():
    for bos in (300, -1, 2**40):
        with pytest.raises(UserError, match=f"bos_id: token id {bos} lies outside"):
            read_architecture({**CONFIG, "bos_token_id": bos})
    with pytest.raises(UserError, match="'2' is not a token id"):
        read_architecture({**CONFIG, "eos_token_id": [1, "2"]})
    found = read_architecture({**CONFIG, "bos_token_id": 299, "eos_token_id": [128009, 7, 2]})
    assert found.eos_ids == (128009, 7, 2) and found.end_id == 7
    assert Architecture.from_dict(asdict(found)) == found
    for eos, says in (([300], "300"), (None, "none given")):
        with pytest.raises(UserError, match=f"no end token.*{says}"):
            _ = read_architecture({**CONFIG, "eos_token_id": eos}).end_id


def test_requests_that_do_not_fit_a_model():
    for prompt, says in (([], "empty"), ([1] * 9, "9 tokens, the context holds 8"), ([5, 300], "300")):
        with pytest.raises(UserError, match=says):
            check_prompt(LIMITS, prompt)
    check_prompt(LIMITS, [299] * 8)
    chain = tree_from_parents([1, 2, 3], [-1, 0, 1])
    for tree, length, says in (
        (tree_from_parents([1] * 5, [-1, 0, 0, 0, 0]), 0, "5 nodes"),
        (chain, 6, "past the context of 8"),
        (tree_from_parents([1, 300], [-1, 0]), 0, "the draft tree: token id 300"),
        (root_only(-1), 0, "token id -1"),
    ):
        with pytest.raises(UserError, match=says):
            check_tree(LIMITS, tree, length)
    check_tree(LIMITS, chain, 5)
    kept = np.array([0, 2, 5])
    assert kept_rows(kept, [0, 5]).tolist() == [0, 2]
    for path in ([], [1], [0, 9], [-1]):
        with pytest.raises(ValueError, match="not kept"):
            kept_rows(kept, path)


def test_the_loop_refuses_a_prompt_before_it_calls_the_model():
    class Untouched:
        limits = LIMITS

    with pytest.raises(UserError, match="the prompt: token id 300"):
        next(decode(Untouched(), Drafter(1), [1, 300], 5))


@pytest.mark.parametrize(
    ("tokens", "parents", "depths"),
    [
        ([1, 2], [-1, 0], [0, 2]), ([1, 2], [-1, 0], [1, 2]), ([1, 2, 3], [-1, 0], [0, 1]),
        ([1], [-1, 0], [0, 1]),
    ],
)  # fmt: skip
def test_arrays_that_are_no_tree(tokens, parents, depths):
    with pytest.raises(ValueError, match="a (tree|node)"):
        DraftTree(*(np.array(a, np.int32) for a in (tokens, parents, depths)))


@pytest.mark.parametrize("parents", [[-1, 5], [-1, -7], [0, 0], [], [-1, 1]])
def test_parents_that_are_no_tree(parents):
    with pytest.raises(ValueError, match="a tree"):
        tree_from_parents([1] * len(parents), parents)
    with pytest.raises(ValueError, match="32 bits"):
        tree_from_parents(np.array([2**40]), [-1])


def make_trace() -> Trace:
    """Two steps: a root, and a tree of which two nodes are accepted."""
    probes = np.array([[5, 6], [7, 8]], np.int32), np.ones((2, 2), np.float32)

    def step(tree, chosen, path):
        kept = np.arange(tree.num_nodes, dtype=np.int32)
        margins = np.ones(len(kept), np.float32)
        return TraceStep(tree, kept, np.array(chosen, np.int32), margins, path, *probes)

    first = step(root_only(4), [3], (0,))
    second = step(tree_from_parents([3, 1, 2], [-1, 0, 1]), [1, 9, 8], (0, 1))
    return Trace("a question", (1, 2), (4, 3, 1, 9), 0.5, (first, second))


def change(**arrays) -> Trace:
    """The trace with something else in its second step."""
    trace = make_trace()
    return replace(trace, steps=(trace.steps[0], replace(trace.steps[1], **arrays)))


DAMAGED = {
    "prompt id": (replace(make_trace(), prompt=(1, 300)), "its prompt: token id 300"),
    "negative prompt id": (replace(make_trace(), prompt=(-1, 3)), "token id -1"),
    "tree id": (change(tree=tree_from_parents([3, 1, 999], [-1, 0, 1])), "tree of step 2: token id 999"),
    "chosen id": (change(chosen=np.array([1, 9, 999], np.int32)), "chosen tokens of step 2"),
    "probe id": (change(probe_ids=np.array([[5, 6], [7, 300]], np.int32)), "probes of step 2"),
    "path": (change(path=(0, 2)), "accepted path"),
    "kept": (change(kept=np.array([0, 1, 7], np.int32)), "kept nodes"),
    "kept twice": (change(kept=np.array([0, 1, 1], np.int32)), "kept nodes"),
    "no root": (change(kept=np.array([1, 2], np.int32), chosen=np.array([9, 8], np.int32),
                       margins=np.ones(2, np.float32)), "accepted path"),
    "another root": (change(tree=tree_from_parents([7, 1, 2], [-1, 0, 1])), "does not begin"),
    "text cut": (replace(make_trace(), generated=(4, 3)), "do not make up"),
    "text longer": (replace(make_trace(), generated=(4, 3, 1, 9, 9)), "do not make up"),
    "step lost": (replace(make_trace(), steps=make_trace().steps[:1]), "do not make up"),
    "margin": (change(margins=np.array([1, -1, 1], np.float32)), "'margins'"),
    "margin nan": (change(margins=np.array([1, np.nan, 1], np.float32)), "'margins'"),
    "first margin": (replace(make_trace(), first_margin=-0.1), "first_margin"),
    "first margin nan": (replace(make_trace(), first_margin=float("nan")), "not valid JSON"),
    "probe nan": (change(probe_logits=np.full((2, 2), np.nan, np.float32)), "probe_logits"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_traces_are_refused(tmp_path, damage):
    trace, says = DAMAGED[damage]
    save_traces([make_trace(), trace], tmp_path / "golden")
    with pytest.raises(UserError, match=says):
        load_traces(tmp_path / "golden", 300)


def test_parents_of_a_trace_point_back(tmp_path):
    save_traces([make_trace()], tmp_path / "golden")
    file = tmp_path / "golden.safetensors"
    content = file.read_bytes()
    parents = np.array([-1, -1, 0, 1], np.int32).tobytes()
    assert content.count(parents) == 1
    for wrong in ([-1, -1, 0, 9], [-1, -1, 2, 1], [-1, 0, 0, 1], [-1, -1, 0, -9]):
        file.write_bytes(content.replace(parents, np.array(wrong, np.int32).tobytes()))
        with pytest.raises(UserError, match="golden prompt 0: a tree"):
            load_traces(tmp_path / "golden")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"steps": 2', '"steps": 3', "3 steps, 2 are described"),
        ('"steps": 2', '"steps": "2"', "Expected `int`"),
        ('"prompt_tokens": 2', '"prompt_tokens": 3', r"'prompts' is int32 \[2\], expected int32 \[3\]"),
        ('"generated_tokens": 4', '"generated_tokens": 0', "generated_tokens"),
        ('"nodes": 3', '"nodes": 2', "'tree_tokens'"),
        ('"kept": 3', '"kept": -3', "kept"),
        ('"text": "a question"', '"text": 5', "text"),
    ],
)
def test_counts_that_do_not_fit_the_arrays(tmp_path, old, new, says):
    save_traces([make_trace()], tmp_path / "golden")
    file = tmp_path / "golden.json"
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=says):
        load_traces(tmp_path / "golden")


def test_a_prompt_whose_first_token_ends_it_has_no_steps(tmp_path):
    save_traces([Trace("a", (1,), (2,), 0.5, ())], tmp_path / "golden")
    [loaded] = load_traces(tmp_path / "golden", 300)
    assert loaded.steps == () and loaded.generated == (2,)
