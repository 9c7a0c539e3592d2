"""Ids in exported functions: numbered where the layout is known, left alone where it is not."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from ss_runtime.mlx.function_ids import number_ids


def export(path) -> None:
    """Two functions that share a constant; one has an operation with two outputs."""
    table = mx.arange(12, dtype=mx.float32).reshape(4, 3)
    mx.eval(table)

    def function(**inputs):
        if "y" in inputs:
            first, second = mx.divmod(inputs["y"], table[0])
            return [first + second, table[1] * mx.softmax(inputs["y"])]
        return [mx.take(table, inputs["x"], axis=0).astype(mx.float16), mx.concatenate([table, table])]

    with mx.exporter(str(path), function) as exporter:
        exporter(x=mx.array([0, 1]))
        exporter(y=mx.ones((3,)))


def outputs(path) -> list[np.ndarray]:
    run = mx.import_function(str(path))
    made = [*run(x=mx.array([2, 1])), *run(y=mx.array([5.0, 7.0, 9.0]))]
    return [np.array(a) for a in made]


def test_numbered_functions_compute_the_same(tmp_path):
    path = tmp_path / "f.mlxfn"
    export(path)
    before, wanted = path.read_bytes(), outputs(path)
    held = [mx.zeros((1,)) for _ in range(5000)]  # other addresses
    assert number_ids(path) and len(path.read_bytes()) == len(before) and path.read_bytes() != before
    for ours, theirs in zip(outputs(path), wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    export(tmp_path / "again.mlxfn")
    assert number_ids(tmp_path / "again.mlxfn")
    assert (tmp_path / "again.mlxfn").read_bytes() == path.read_bytes()
    assert len(held) == 5000 and number_ids(path)  # once more changes nothing
    assert (tmp_path / "again.mlxfn").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("cut", [9, 40, 200, -1])
def test_an_unknown_layout_is_left_alone(tmp_path, cut):
    path = tmp_path / "f.mlxfn"
    export(path)
    path.write_bytes(path.read_bytes()[:cut])
    before = path.read_bytes()
    assert not number_ids(path) and path.read_bytes() == before
    path.write_bytes(b"x" * 500)
    assert not number_ids(path) and path.read_bytes() == b"x" * 500
