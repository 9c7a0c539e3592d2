"""Reading packages: states, functions, weights, compression, damage."""

import json
import shutil
import struct
import subprocess
import sys

import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from coremltools.libmilstoragepython import _BlobStorageReader
from coremltools.proto import Model_pb2

from ss_executor import (
    ExecutorError,
    PackageError,
    UnknownOpError,
    load_package,
)
from ss_executor.blob import BlobFile
from ss_executor.graph import TensorType

from .harness import save_program

RNG = np.random.default_rng(4)
MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"


def linear_package(path, weight, **options):
    """Package of x (1, I) -> x · weight.T, weight (O, I) kept in the weight file."""
    x = np.zeros((1, weight.shape[1]), np.float16)
    return save_program(path, lambda x: [mb.linear(x=x, weight=weight)], {"x": x}, **options)


def edit_model(path, change):
    """Parse the model file of a package, change the message, write it back."""
    spec = Model_pb2.Model()
    spec.ParseFromString((path / MODEL).read_bytes())
    change(spec)
    (path / MODEL).write_bytes(spec.SerializeToString())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A package with one 48 × 64 weight, and the weight."""
    path = tmp_path_factory.mktemp("plain") / "plain.mlpackage"
    weight = RNG.normal(size=(48, 64)).astype(np.float16)
    linear_package(path, weight)
    return path, weight


# ---- states -------------------------------------------------------------------------------------


def cache_graph(x, begin, cache):
    """Writes x (2, 4) into rows begin.. of both halves of cache (2, 8, 4), then sums it."""
    old = mb.read_state(input=cache)
    before = mb.reduce_sum(x=old, axes=[0, 1, 2], keep_dims=True)
    result = []
    for half in (0, 1):
        start = mb.concat(values=[np.int32([half]), begin, np.int32([0])], axis=0)
        end = mb.add(x=start, y=np.int32([1, 2, 4]))
        rows = mb.expand_dims(x=mb.mul(x=x, y=np.float16(1 + half)), axes=[0])
        current = mb.read_state(input=cache)
        updated = mb.slice_update(x=current, update=rows, begin=start, end=end)
        stored = mb.coreml_update_state(state=cache, value=updated)
        result.append(mb.reduce_sum(x=stored, axes=[1, 2]))
    return [before, *result]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_cache_state_updates(tmp_path, dtype):
    path = tmp_path / "cache.mlpackage"
    inputs = {"x": np.zeros((2, 4), np.float16), "begin": np.zeros(1, np.int32)}
    save_program(path, cache_graph, inputs, states={"cache": (2, 8, 4)})
    program = load_package(path).program("main", dtype)
    state, expected = program.make_state(), np.zeros((2, 8, 4))
    assert state["cache"].shape == (2, 8, 4) and not state["cache"].any()
    for begin in (0, 5, 4):
        x = RNG.integers(-8, 8, size=(2, 4)).astype(np.float16)
        before = expected.sum()
        expected[0, begin : begin + 2] = x
        first = expected.sum((1, 2))
        expected[1, begin : begin + 2] = 2 * x
        outputs = program.predict({"x": x, "begin": np.int32([begin])}, state)
        for given, wanted in zip(outputs.values(), (before, first, expected.sum((1, 2))), strict=True):
            np.testing.assert_array_equal(given.reshape(-1), np.reshape(wanted, -1))
        np.testing.assert_array_equal(state["cache"], expected)


def test_updates_of_a_dead_value_reuse_its_memory(tmp_path):
    path = tmp_path / "cache.mlpackage"
    inputs = {"x": np.ones((2, 4), np.float16), "begin": np.zeros(1, np.int32)}
    save_program(path, cache_graph, inputs, states={"cache": (2, 8, 4)})
    program = load_package(path).program("main")
    state = program.make_state()
    array = state["cache"]
    kept = state.copy()
    program.predict(inputs, state)
    assert state["cache"] is array and array.any() and not kept["cache"].any()


def aliasing_graph(x, cache, other):
    """Every way in which an update in place would be seen by somebody else."""
    old = mb.read_state(input=cache)
    view = mb.reshape(x=old, shape=[4, 2])
    changed = mb.slice_update(x=old, update=x, begin=[0, 0], end=[1, 4])
    mb.coreml_update_state(state=cache, value=changed)
    seen = mb.add(x=view, y=np.float16(0))  # must still be the old value
    twice = mb.slice_update(x=changed, update=x, begin=[1, 0], end=[2, 4])  # state must not change
    mb.coreml_update_state(state=other, value=changed)
    again = mb.read_state(input=other)
    last = mb.slice_update(x=again, update=mb.mul(x=x, y=np.float16(5)), begin=[1, 0], end=[2, 4])
    mb.coreml_update_state(state=other, value=last)
    constant = mb.const(val=np.full((2, 4), 3, np.float16))
    filled = mb.slice_update(x=constant, update=x, begin=[0, 0], end=[1, 4])
    return [seen, twice, filled, mb.identity(x=mb.read_state(input=cache)), changed]


def test_updates_never_change_what_others_see(tmp_path):
    path = tmp_path / "alias.mlpackage"
    x = np.float16([[1, 2, 3, 4]])
    save_program(path, aliasing_graph, {"x": x}, states={"cache": (2, 4), "other": (2, 4)})
    program = load_package(path).program("main", "float32")
    state = program.make_state()
    state["cache"][:] = 7
    row, zero = x[0].astype(np.float32), np.zeros(4)
    previous = np.full((2, 4), 7.0)
    for _ in range(3):
        values = list(program.predict({"x": x}, state).values())
        changed = np.array([row, previous[1]])
        np.testing.assert_array_equal(values[0], previous.reshape(4, 2))
        np.testing.assert_array_equal(values[1], [row, row])
        np.testing.assert_array_equal(values[2], [row, zero + 3])
        np.testing.assert_array_equal(values[3], changed)
        np.testing.assert_array_equal(values[4], changed)
        np.testing.assert_array_equal(state["cache"], changed)
        np.testing.assert_array_equal(state["other"], [row, 5 * row])
        previous = changed


def test_functions_share_weights_and_a_state(tmp_path):
    weight = RNG.normal(size=(64, 64)).astype(np.float16)

    def graph(factor):
        def function(x, total):
            added = mb.mul(x=mb.linear(x=x, weight=weight), y=np.float16(factor))
            value = mb.add(x=mb.read_state(input=total), y=added)
            return [mb.identity(x=mb.coreml_update_state(state=total, value=value))]

        return function

    x = RNG.normal(size=(1, 64)).astype(np.float16)
    descriptor = ct.utils.MultiFunctionDescriptor()
    for name, factor in (("one", 1.0), ("two", 2.0)):
        part = tmp_path / f"{name}.mlpackage"
        save_program(part, graph(factor), {"x": x}, states={"total": (1, 64)})
        descriptor.add_function(str(part), src_function_name="main", target_function_name=name)
    descriptor.default_function_name = "one"
    path = tmp_path / "both.mlpackage"
    ct.utils.save_multifunction(descriptor, str(path))

    package = load_package(path)
    assert set(package.functions) == {"one", "two"}
    assert package.functions["one"].states["total"].dtype == "float16"
    one, two = (package.program(name, "float32") for name in ("one", "two"))
    large = [v for v in package._weights.values() if getattr(v, "size", 0) == weight.size]
    assert len(large) == 1
    state = one.make_state()
    one.predict({"x": x}, state)
    two.predict({"x": x}, state)
    (result,) = one.predict({"x": x}, state).values()
    product = x.astype(np.float64) @ weight.astype(np.float64).T
    np.testing.assert_allclose(result, 4 * product, rtol=1e-4, atol=1e-4)


def test_state_of_another_type_is_taken_over(tmp_path):
    path = tmp_path / "cache.mlpackage"
    inputs = {"x": np.ones((2, 4), np.float16), "begin": np.zeros(1, np.int32)}
    save_program(path, cache_graph, inputs, states={"cache": (2, 8, 4)})
    program = load_package(path).program("main")
    state = {"cache": np.ones((2, 8, 4), np.float16)}
    before = next(iter(program.predict(inputs, state).values()))
    assert before.item() == 64
    with pytest.raises(ExecutorError, match="state 'cache' has shape"):
        program.predict(inputs, {"cache": np.ones((2, 8), np.float16)})
    with pytest.raises(ExecutorError, match="needs a state"):
        program.predict(inputs)


# ---- inputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "input 'x' is missing"),
        ({"x": np.zeros((1, 64)), "y": np.zeros(1)}, "unknown input 'y'"),
        ({"x": np.zeros((1, 63), np.float32)}, r"shape \(1, 63\), expected \(1, 64\)"),
        ({"x": np.zeros((1, 64), np.int32)}, "type int32, expected float16"),
    ],
)
def test_wrong_inputs(plain, inputs, message):
    program = load_package(plain[0]).program("main")
    with pytest.raises(ExecutorError, match=message) as caught:
        program.predict(inputs)
    assert "\n" not in str(caught.value)


def test_unknown_function_and_dtype(plain):
    package = load_package(plain[0])
    with pytest.raises(ExecutorError, match="no function 'mian'"):
        package.program("mian")
    with pytest.raises(ExecutorError, match="bfloat16"):
        package.program("main", "bfloat16")


# ---- weights ------------------------------------------------------------------------------------


def test_weights_are_those_of_the_file(plain, tmp_path):
    path, weight = plain
    x = RNG.normal(size=(1, 64)).astype(np.float16)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    (result,) = load_package(path).program("main", "float32").predict({"x": x}).values()
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
    # One changed weight in the file changes exactly its output.
    copy = tmp_path / "changed.mlpackage"
    shutil.copytree(path, copy)
    data = bytearray((copy / WEIGHTS).read_bytes())
    start = data.find(weight.tobytes())
    data[start : start + 2] = np.float16(50).tobytes()
    (copy / WEIGHTS).write_bytes(data)
    (changed,) = load_package(copy).program("main", "float32").predict({"x": x}).values()
    assert np.flatnonzero(changed != result).tolist() == [0]


def test_blob_reader_agrees_with_coremltools(plain):
    path, weight = plain
    reader = _BlobStorageReader(str(path / WEIGHTS))
    theirs = np.array(reader.read_fp16_data(64)).view(np.float16)
    ours = BlobFile(path / WEIGHTS).read(64, TensorType("float16", weight.shape))
    np.testing.assert_array_equal(ours.reshape(-1), theirs)
    np.testing.assert_array_equal(ours, weight)


def configurations():
    linear, palette = cto.OpLinearQuantizerConfig, cto.OpPalettizerConfig
    prune = cto.OpMagnitudePrunerConfig
    small = {"weight_threshold": 0}
    return {
        "int8 channel": (cto.linear_quantize_weights, linear(mode="linear_symmetric", **small)),
        "int8 affine": (cto.linear_quantize_weights, linear(mode="linear", dtype="uint8", **small)),
        "int4 block": (
            cto.linear_quantize_weights,
            linear(mode="linear_symmetric", dtype="int4", granularity="per_block", block_size=16,
                   **small),
        ),
        "uint4 block": (
            cto.linear_quantize_weights,
            linear(mode="linear", dtype="uint4", granularity="per_block", block_size=32, **small),
        ),
        "lut4": (cto.palettize_weights, palette(mode="uniform", nbits=4, **small)),
        "lut6": (cto.palettize_weights, palette(mode="uniform", nbits=6, **small)),
        "lut3 grouped": (
            cto.palettize_weights,
            palette(mode="uniform", nbits=3, granularity="per_grouped_channel", group_size=8,
                    channel_axis=0, **small),
        ),
        "lut2 grouped": (
            cto.palettize_weights,
            palette(mode="uniform", nbits=2, granularity="per_grouped_channel", group_size=16,
                    channel_axis=1, **small),
        ),
        "sparse": (cto.prune_weights, prune(target_sparsity=0.6, **small)),
    }  # fmt: skip


def compressed_cases():
    """Every form for iOS 18; those without blocks or groups exist for iOS 16 as well."""
    for name in configurations():
        yield name, ct.target.iOS18
        if "block" not in name and "grouped" not in name:
            yield name, ct.target.iOS16


@pytest.mark.parametrize(("name", "target"), list(compressed_cases()))
def test_compressed_weights(tmp_path, name, target):
    weight = RNG.normal(size=(48, 64)).astype(np.float16)
    if target == ct.target.iOS16:
        # This opset has no fp16 inputs without a cast, so the model stays in float32.
        weight = weight.astype(np.float32)
    x = np.eye(64, dtype=weight.dtype)
    model = save_program(
        tmp_path / "dense.mlpackage",
        lambda x: [mb.linear(x=x, weight=weight, bias=np.zeros(48, weight.dtype))],
        {"x": x},
        target=target,
    )
    compress, config = configurations()[name]
    compressed = compress(model, cto.OptimizationConfig(global_config=config))
    path = tmp_path / "compressed.mlpackage"
    compressed.save(str(path))
    package = load_package(path)
    assert any(op.startswith("constexpr_") for op in package.functions["main"].op_histogram())
    # The independent source is coremltools' own decompression.
    restored = tmp_path / "restored.mlpackage"
    cto.decompress_weights(compressed).save(str(restored))
    (wanted,) = load_package(restored).program("main", "float32").predict({"x": x}).values()
    (result,) = package.program("main", "float16").predict({"x": x}).values()
    np.testing.assert_allclose(result, wanted, rtol=2e-3, atol=2e-3)
    assert np.corrcoef(result.T.reshape(-1), weight.reshape(-1))[0, 1] > 0.85


def test_block_scales_by_the_definition(tmp_path):
    data = RNG.integers(-8, 8, size=(4, 32)).astype(np.int8)
    scale = RNG.uniform(0.5, 2, size=(2, 4)).astype(np.float16)
    offset = RNG.integers(-8, 8, size=(2, 4)).astype(np.int8)

    def graph(x):
        weight = mb.constexpr_blockwise_shift_scale(data=data, scale=scale, offset=offset)
        return [mb.linear(x=x, weight=weight, bias=np.zeros(4, np.float16))]

    path = tmp_path / "blocks.mlpackage"
    x = np.eye(32, dtype=np.float16)
    save_program(path, graph, {"x": x})
    (result,) = load_package(path).program("main", "float32").predict({"x": x}).values()
    for i, j in np.ndindex(4, 32):
        block = (i // 2, j // 8)
        wanted = float(scale[block]) * (int(data[i, j]) - int(offset[block]))
        assert abs(result[j, i] - wanted) < 1e-5


def test_vector_lookup_tables_by_the_definition(tmp_path):
    indices = RNG.integers(0, 4, size=(3, 4)).astype(np.uint8)
    lut = RNG.normal(size=(1, 2, 4, 2)).astype(np.float16)
    from coremltools.converters.mil.mil import types

    def graph(x):
        packed = indices.astype(types.nptype_from_builtin(types.uint2))
        weight = mb.constexpr_lut_to_dense(indices=packed, lut=lut, vector_axis=0)
        return [mb.linear(x=x, weight=weight, bias=np.zeros(6, np.float16))]

    path = tmp_path / "vectors.mlpackage"
    x = np.eye(4, dtype=np.float16)
    save_program(path, graph, {"x": x})
    (result,) = load_package(path).program("main", "float32").predict({"x": x}).values()
    for i, j, part in np.ndindex(3, 4, 2):
        assert result[j, 2 * i + part] == np.float32(lut[0, j // 2, indices[i, j], part])


def test_quantize_and_dequantize(tmp_path):
    x = RNG.normal(size=(2, 5)).astype(np.float32) * 4
    scale, zero = np.float32([0.1, 0.05]), np.int8([3, -4])

    def graph(x):
        q = mb.quantize(input=x, scale=scale, zero_point=zero, output_dtype="int8", axis=0)
        return [mb.dequantize(input=q, scale=scale, zero_point=zero, axis=0)]

    path = tmp_path / "quantized.mlpackage"
    save_program(path, graph, {"x": x})
    (result,) = load_package(path).program("main").predict({"x": x}).values()
    for i, j in np.ndindex(2, 5):
        q = min(max(round(float(x[i, j]) / float(scale[i])) + int(zero[i]), -128), 127)
        assert abs(result[i, j] - float(scale[i]) * (q - int(zero[i]))) < 1e-5


# ---- refusals -----------------------------------------------------------------------------------


def test_unknown_operation_is_named(plain, tmp_path):
    path = tmp_path / "odd.mlpackage"
    shutil.copytree(plain[0], path)

    def rename(spec):
        block = spec.mlProgram.functions["main"].block_specializations["CoreML8"]
        for operation in block.operations:
            if operation.type == "linear":
                operation.type = "warp_drive"

    edit_model(path, rename)
    package = load_package(path)
    output = list(package.functions["main"].outputs)[0]
    with pytest.raises(UnknownOpError) as caught:
        package.program("main")
    assert (caught.value.op_type, caught.value.function) == ("warp_drive", "main")
    assert output in str(caught.value) and "\n" not in str(caught.value)


def _remove_manifest(path):
    (path / "Manifest.json").unlink()


def _garble_manifest(path):
    (path / "Manifest.json").write_text("{")


def _remove_model(path):
    (path / MODEL).unlink()


def _garble_model(path):
    (path / MODEL).write_bytes(b"\xff" * 100)


def _empty_model(path):
    (path / MODEL).write_bytes(b"")


def _other_kind(path):
    def change(spec):
        spec.ClearField("mlProgram")
        spec.neuralNetwork.SetInParent()

    edit_model(path, change)


def _remove_weights(path):
    (path / WEIGHTS).unlink()


def _truncate_weights(path):
    data = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(data[: len(data) // 2])


def _truncate_to_header(path):
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:64])


def _break_sentinel(path):
    data = bytearray((path / WEIGHTS).read_bytes())
    data[64:68] = struct.pack("<I", 7)
    (path / WEIGHTS).write_bytes(data)


def _swap_type(path):
    data = bytearray((path / WEIGHTS).read_bytes())
    data[68:72] = struct.pack("<I", 2)
    (path / WEIGHTS).write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "no such package"),
        (_remove_manifest, "Manifest.json"),
        (_garble_manifest, "damaged"),
        (_remove_model, "is missing"),
        (_garble_model, "damaged"),
        (_empty_model, "expected an ML program"),
        (_other_kind, "neuralNetwork"),
        (_remove_weights, "weight file 'weights/weight.bin' is missing"),
        (_truncate_weights, "bytes long"),
        (_truncate_to_header, "bytes long"),
        (_break_sentinel, "no constant at offset 64"),
        (_swap_type, "is float32, the program expects float16"),
    ],
)
def test_damaged_packages(plain, tmp_path, damage, message):
    path = tmp_path / "damaged.mlpackage"
    shutil.copytree(plain[0], path)
    damage(path)
    with pytest.raises(PackageError, match=message) as caught:
        load_package(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_declared_shape_that_does_not_hold_is_an_error(plain, tmp_path):
    path = tmp_path / "shape.mlpackage"
    shutil.copytree(plain[0], path)

    def change(spec):
        block = spec.mlProgram.functions["main"].block_specializations["CoreML8"]
        operation = next(op for op in block.operations if op.type == "linear")
        operation.outputs[0].type.tensorType.dimensions[1].constant.size = 47

    edit_model(path, change)
    program = load_package(path).program("main")
    with pytest.raises(ExecutorError, match=r"result has shape \(1, 48\), .* declares \(1, 47\)"):
        program.predict({"x": np.zeros((1, 64), np.float16)})


# ---- command line -------------------------------------------------------------------------------


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "ss_executor", *map(str, arguments)],
        capture_output=True, text=True,
    )  # fmt: skip


def test_command_describes(plain):
    result = command(plain[0], "--json")
    record = json.loads(result.stdout)
    assert result.returncode == 0
    assert record["functions"]["main"]["operations"]["linear"] == 1
    assert record["functions"]["main"]["inputs"] == [{"name": "x", "shape": [1, 64], "dtype": "float16"}]
    assert record["weight_bytes"] >= 48 * 64 * 2
    text = command(plain[0])
    assert text.returncode == 0 and "function main" in text.stdout and "linear 1" in text.stdout


def test_command_runs(plain, tmp_path):
    x = RNG.normal(size=(1, 64)).astype(np.float16)
    np.savez(tmp_path / "in.npz", x=x)
    result = command(plain[0], "--function", "main", "--inputs", tmp_path / "in.npz",
                     "--outputs", tmp_path / "out.npz", "--dtype", "float32")  # fmt: skip
    assert result.returncode == 0, result.stderr
    with np.load(tmp_path / "out.npz") as outputs:
        (value,) = (outputs[name] for name in outputs)
    expected = x.astype(np.float64) @ plain[1].astype(np.float64).T
    np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-4)


def test_command_refuses_in_one_line(plain, tmp_path):
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    out = ("--outputs", tmp_path / "out.npz")
    for arguments in (
        (tmp_path / "none.mlpackage",),
        (plain[0], "--function", "mian", *out),
        (plain[0], "--function", "main", *out),
        (plain[0], "--function", "main", "--inputs", tmp_path / "bad.npz", *out),
        (plain[0], "--function", "main"),
        (plain[0], "--bogus"),
        (plain[0], "--dtype", "float64"),
        (),
    ):
        result = command(*arguments)
        assert result.returncode == 2
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert "example:" in command("--help").stdout


@pytest.mark.parametrize("option", ["--inputs", "--state", "--outputs", "--state-out"])
def test_command_refuses_files_without_a_function(plain, tmp_path, option):
    result = command(plain[0], option, tmp_path / "some.npz")
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == f"error: {option} needs --function, which to run\n"


def test_command_is_quiet_when_its_reader_goes_away(plain):
    process = subprocess.Popen(
        [sys.executable, "-m", "ss_executor", str(plain[0])],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 0
    process.stderr.close()


def test_the_executor_needs_neither_torch_nor_mlx(plain):
    code = (
        "import sys; from ss_executor import load_package;"
        f"load_package({str(plain[0])!r}).program('main');"
        "sys.exit(any(name in sys.modules for name in ('torch', 'mlx', 'coremltools')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("bits", [None, 8], ids=["fp16", "int8"])
def test_weights_that_are_not_kept_give_the_same_results(tmp_path, bits):
    weight = RNG.normal(size=(256, 300)).astype(np.float16)
    path = tmp_path / "large.mlpackage"
    linear_package(path, weight)
    if bits:
        config = cto.OpLinearQuantizerConfig(mode="linear_symmetric", weight_threshold=0)
        model = ct.models.MLModel(str(path), skip_model_load=True)
        cto.linear_quantize_weights(model, cto.OptimizationConfig(global_config=config)).save(str(path))
    package, x = load_package(path), RNG.normal(size=(1, 300)).astype(np.float16)
    kept, dropped = (package.program("main", "float32", keep) for keep in (True, False))
    first, again = dropped.predict({"x": x}), dropped.predict({"x": x})
    for name, values in kept.predict({"x": x}).items():
        np.testing.assert_array_equal(first[name], values)
        np.testing.assert_array_equal(again[name], values)
    assert max(w.size for w in package._weights.values()) == weight.size
    assert not any(w.size == weight.size for w in dropped._weights.values())
