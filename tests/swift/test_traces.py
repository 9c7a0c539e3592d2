"""The recorded steps that the Swift tests compare with are what the Python side does today."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tests.swift.recorded_columns import INPUT_RESOURCES, RESOURCES
from tests.swift.recorded_decoding import export_decoding, export_noise
from tests.swift.recorded_inputs import export_inputs
from tests.swift.recorded_trees import tree_cases


def assert_same(written: Path, committed: Path, close: tuple[str, ...] = ()) -> None:
    found, expected = load_file(written), load_file(committed)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        if name in close:
            np.testing.assert_allclose(found[name], array, rtol=1e-12)
        else:
            np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_noise_is_what_was_recorded(tmp_path):
    export_noise(tmp_path / "noise.safetensors")
    assert_same(tmp_path / "noise.safetensors", RESOURCES / "noise.safetensors", close=("draw_largest",))


def test_generations_are_what_was_recorded(tmp_path):
    export_decoding(tmp_path / "decoding.safetensors")
    assert_same(tmp_path / "decoding.safetensors", RESOURCES / "decoding.safetensors")


def test_step_inputs_are_what_was_recorded(tmp_path):
    export_inputs(tmp_path / "inputs.safetensors")
    assert_same(tmp_path / "inputs.safetensors", INPUT_RESOURCES / "inputs.safetensors")


def test_trees_are_what_was_recorded():
    recorded = load_file(RESOURCES / "trees.safetensors")
    starts = np.concatenate([[0], np.cumsum(recorded["tokens.count"])])
    for row, case in enumerate(tree_cases(60)):
        assert case.key == recorded["key"][row]
        tree = case.grow()
        nodes = slice(starts[row], starts[row + 1])
        np.testing.assert_array_equal(tree.tokens, recorded["tokens"][nodes])
        np.testing.assert_array_equal(tree.parents, recorded["parents"][nodes])
