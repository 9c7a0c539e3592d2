"""The Core ML step model over recording engines: what it feeds, and when it commits."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from ss_device.architecture import Architecture
from ss_device.bundle import StepFunctions
from ss_device.config import SpeculativeConfig
from ss_device.errors import UserError
from ss_device.tree import root_only, tree_from_parents
from ss_runtime.coreml.engines import open_coreml_model, open_executor_model
from ss_runtime.function_step_model import FunctionStepModel

ARCHITECTURE = Architecture(
    family="llama",
    vocab_size=50,
    hidden_size=8,
    intermediate_size=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    norm_eps=1e-6,
    rope_theta=1e4,
    max_positions=64,
    tied_head=True,
)


class Recorder:
    """An engine that answers every step alike and remembers its inputs."""

    def __init__(self, kept: list[int], accepted: int = 0) -> None:
        self.kept, self.accepted = kept, accepted
        self.calls: list[dict[str, np.ndarray]] = []
        self.states: list[object] = []

    def make_state(self):
        return {"kv_cache": np.zeros(1)}

    def predict(self, inputs, state):
        self.calls.append(dict(inputs))
        self.states.append(state)
        return {
            "kept": np.array(self.kept, np.int32),
            "chosen": np.array(self.kept, np.int32) + 10,
            "accepted": np.array([self.accepted], np.int32),
            "stream_logits": np.zeros((2, 50), np.float16),
        }


def make_model(num_nodes=5, kept=(0, 1, 2, 3, 4), context=12, chunk=4, **changes):
    functions = StepFunctions(
        package="coreml/x.mlpackage",
        prefill="x_prefill",
        step="x_step",
        chunk=chunk,
        num_nodes=num_nodes,
        num_kept=len(kept),
        context=context,
    )
    config = SpeculativeConfig(num_streams=2, num_msa_layers=1, **changes)
    prefill, step = Recorder(list(kept)), Recorder(list(kept))
    return FunctionStepModel(prefill, step, functions, config, ARCHITECTURE), prefill, step


def visible(mask: np.ndarray) -> list[list[int]]:
    return [np.nonzero(row == 0)[0].tolist() for row in mask]


def test_prefill_feeds_chunks_and_the_last_token_as_a_tree():
    model, prefill, step = make_model()
    proposal = model.prefill([1, 2, 3, 4, 5, 6, 7])
    assert [c["tokens"].tolist() for c in prefill.calls] == [[[1, 2, 3, 4]], [[5, 6, 6, 6]]]
    assert [c["position"].tolist() for c in prefill.calls] == [[0], [4]]
    assert visible(prefill.calls[0]["mask"]) == [[12], [12, 13], [12, 13, 14], [12, 13, 14, 15]]
    assert visible(prefill.calls[1]["mask"])[1] == [0, 1, 2, 3, 12, 13]
    (call,) = step.calls
    assert call["tokens"].tolist() == [[7] * 5] and call["positions"].tolist() == [6] * 5
    assert call["parents"].tolist() == [-1] * 5
    assert visible(call["mask"]) == [[*range(6), 12], [13], [14], [15], [16]]
    assert call["commit_position"].tolist() == [6] and call["commit_nodes"].tolist() == [-1] * 5
    assert proposal.root == 10 and model.length == 7
    assert all(s is model.state for s in prefill.states + step.states)


def test_commit_is_carried_out_by_the_next_step_once():
    model, _, step = make_model()
    model.prefill([1, 2, 3])
    tree = tree_from_parents([10, 11, 12, 13], [-1, 0, 0, 2])
    verified = model.step(tree)
    assert verified.kept.tolist() == [0, 1, 2, 3] and verified.chosen.tolist() == [10, 11, 12, 13]
    first = step.calls[-1]
    assert first["commit_nodes"].tolist() == [0, -1, -1, -1, -1]
    assert first["commit_position"].tolist() == [2]
    assert first["positions"].tolist() == [3, 4, 4, 5, 3]
    assert visible(first["mask"])[3] == [0, 1, 2, 12, 14, 15]
    model.commit([0, 2, 3])
    assert model.length == 6
    model.step(root_only(4))
    assert step.calls[-1]["commit_nodes"].tolist() == [0, 2, 3, -1, -1]
    assert step.calls[-1]["commit_position"].tolist() == [3]
    model.step(root_only(4))
    assert step.calls[-1]["commit_nodes"].tolist() == [-1] * 5
    assert step.calls[-1]["commit_position"].tolist() == [6]


def test_pruning_has_a_second_index_map():
    model, _, step = make_model(kept=(0, 2, 3))
    model.prefill([1, 2, 3])
    model.step(tree_from_parents([10, 11, 12, 13], [-1, 0, 0, 2]))
    model.commit([0, 2, 3])
    model.step(root_only(4))
    assert step.calls[-1]["commit_nodes"].tolist() == [0, 2, 3, -1, -1]
    assert step.calls[-1]["commit_rows"].tolist() == [0, 1, 2, -1, -1]
    model.step(tree_from_parents([10, 11, 12, 13], [-1, 0, 0, 2]))
    with pytest.raises(ValueError, match="not kept"):
        model.commit([0, 1])


def test_the_gate_is_fed_only_where_main_attends_streams():
    plain, _, step = make_model()
    plain.prefill([1])
    assert "stream_gate" not in step.calls[0] and "commit_rows" not in step.calls[0]
    gated, _, step = make_model(mode="shared", main_attends_streams=True)
    gated.prefill([1])
    assert step.calls[0]["stream_gate"].tolist() == [0.0]


def test_a_new_prompt_forgets_the_old_one():
    model, prefill, step = make_model()
    model.prefill([1, 2, 3, 4, 5])
    model.step(root_only(3))
    model.commit([0])
    model.prefill([6, 7])
    assert prefill.calls[-1]["position"].tolist() == [0] and model.length == 2
    assert step.calls[-1]["commit_nodes"].tolist() == [-1] * 5
    assert visible(step.calls[-1]["mask"])[0] == [0, 12]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda m: m.prefill([]), "the prompt is empty"),
        (lambda m: m.prefill([1] * 13), "13 tokens, the context holds 12"),
        (lambda m: m.step(tree_from_parents([1] * 6, range(-1, 5))), "6 nodes"),
    ],
)
def test_requests_beyond_the_limits_are_refused(action, message):
    model, *_ = make_model()
    with pytest.raises(UserError, match=message):
        action(model)


def test_a_full_context_and_a_commit_without_step_are_refused():
    model, *_ = make_model()
    model.prefill([1] * 12)
    with pytest.raises(ValueError, match="needs a step"):
        model.commit([0])
    with pytest.raises(UserError, match="past the context of 12 tokens"):
        model.step(root_only(3))


def _bundle_of(coreml):
    adapter = SimpleNamespace(app="x", coreml=coreml, config=SpeculativeConfig())
    return SimpleNamespace(path="bundle"), adapter


def test_core_ml_off_a_mac_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    model, *_ = make_model()
    with pytest.raises(UserError, match="macOS 15 or later.*linux.*executor"):
        open_coreml_model(*_bundle_of(model.functions))


@pytest.mark.parametrize("opener", [open_coreml_model, open_executor_model])
def test_a_bundle_without_package_is_refused(opener):
    with pytest.raises(UserError, match="adapter 'x' has no Core ML package"):
        opener(*_bundle_of(None))
