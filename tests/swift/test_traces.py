"""The recorded steps that the Swift tests compare with are what the Python side does today."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.swift import export_traces

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def exporter():
    return export_traces


def assert_same(written: Path, committed: Path, close: tuple[str, ...] = ()) -> None:
    found, expected = load_file(written), load_file(committed)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        if name in close:
            np.testing.assert_allclose(found[name], array, rtol=1e-12)
        else:
            np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_noise_is_what_was_recorded(exporter, tmp_path):
    exporter.export_noise(tmp_path / "noise.safetensors")
    assert_same(
        tmp_path / "noise.safetensors", exporter.RESOURCES / "noise.safetensors", close=("draw_largest",)
    )


def test_generations_are_what_was_recorded(exporter, tmp_path):
    exporter.export_decoding(tmp_path / "decoding.safetensors")
    assert_same(tmp_path / "decoding.safetensors", exporter.RESOURCES / "decoding.safetensors")


def test_step_inputs_are_what_was_recorded(exporter, tmp_path):
    exporter.export_inputs(tmp_path / "inputs.safetensors")
    assert_same(tmp_path / "inputs.safetensors", exporter.INPUT_RESOURCES / "inputs.safetensors")


def test_trees_are_what_was_recorded(exporter):
    recorded = load_file(exporter.RESOURCES / "trees.safetensors")
    starts = np.concatenate([[0], np.cumsum(recorded["tokens.count"])])
    for row, case in enumerate(exporter.tree_cases(60)):
        assert case.key == recorded["key"][row]
        tree = case.grow()
        nodes = slice(starts[row], starts[row + 1])
        np.testing.assert_array_equal(tree.tokens, recorded["tokens"][nodes])
        np.testing.assert_array_equal(tree.parents, recorded["parents"][nodes])
