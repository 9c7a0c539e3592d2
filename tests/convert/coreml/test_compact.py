"""Compaction of a function with a nested block and names that are in the way, run before and after."""

from __future__ import annotations

import coremltools as ct
import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.models.utils import load_spec, save_spec

from ss_convert.coreml.merging import compact
from ss_executor import load_package


def made(path):
    """A conditional whose branches share constants with what surrounds them; an input called `v1`."""

    @mb.program(
        input_specs=[mb.TensorSpec(shape=(2, 3)), mb.TensorSpec(shape=(1,))],
        opset_version=ct.target.iOS18,
    )
    def program(v1, y):
        x = mb.concat(values=[v1, v1], axis=1)
        total = mb.reduce_sum(x=x, axes=[1], keep_dims=True)
        positive = mb.squeeze(x=mb.greater(x=y, y=0.0), axes=[0])

        def one():
            return mb.mul(x=mb.reduce_sum(x=x, axes=[1], keep_dims=True), y=3.0)

        def other():
            return mb.add(x=total, y=mb.mul(x=total, y=3.0))

        chosen = mb.cond(pred=positive, _true_fn=one, _false_fn=other)
        return mb.mul(x=mb.concat(values=[chosen, total], axis=1), y=3.0, name="v0")

    model = ct.convert(
        program,
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision.FLOAT32,
        skip_model_load=True,
        pass_pipeline=ct.PassPipeline.EMPTY,
    )
    model.save(str(path))
    return path


def test_a_compacted_function_computes_the_same(tmp_path):
    before, after = made(tmp_path / "before.mlpackage"), tmp_path / "after.mlpackage"
    spec = load_spec(str(before))
    function = spec.mlProgram.functions["main"]
    size = function.ByteSize()
    compact(function)
    once = function.SerializeToString(deterministic=True)
    compact(function)
    assert function.SerializeToString(deterministic=True) == once and len(once) < 0.9 * size
    save_spec(spec, str(after), weights_dir=str(before / "Data/com.apple.CoreML/weights"))
    rows = np.arange(6, dtype=np.float32).reshape(2, 3) - 2
    for sign in (-1, 1):
        inputs = {"v1": rows, "y": np.array([sign], np.float32)}
        results = [load_package(p).program("main", "float32").predict(inputs) for p in (before, after)]
        total = 2 * rows.sum(axis=1, keepdims=True)
        chosen = 3 * total if sign > 0 else 4 * total
        np.testing.assert_allclose(results[0]["v0"], 3 * np.concatenate([chosen, total], 1), rtol=1e-5)
        np.testing.assert_array_equal(results[0]["v0"], results[1]["v0"])
