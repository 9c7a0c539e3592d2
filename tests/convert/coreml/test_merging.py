"""Merged packages, read back by coremltools' own loader: nothing here shares code with the merge."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from coremltools.converters.mil.frontend.milproto.load import load
from coremltools.models.utils import load_spec

from ss_convert.coreml.convert import base_weights, build_programs
from ss_convert.coreml.merging import WEIGHTS
from ss_convert.coreml.package import function_path, merge_functions, save_functions
from ss_convert.graph.options import GraphOptions
from ss_device.config import SpeculativeConfig
from ss_executor import load_package
from tests.tiny_models import make_tiny_base, random_adapter

# Forms of less than a byte leave bits over; every other type of a constant is in every package.
FORMS = (("int4", "lut6"), ("lut4", "int8"))


@pytest.fixture(scope="module", params=FORMS, ids="-".join)
def merged(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("merged")
    base = make_tiny_base(folder / "base", dtype="float16")
    weights, embedding = request.param
    options = GraphOptions(4, 4, 16, 4, weights=weights, embedding_weights=embedding)
    stored = base_weights(base.architecture, base.weights(), options)
    adapter = random_adapter(base, SpeculativeConfig(num_streams=2, num_msa_layers=1))
    programs = build_programs(base.architecture, stored, adapter, options)
    save_functions(programs, folder)
    sources = {name: (function_path(folder, name), "main") for name in programs}
    path = folder / "both.mlpackage"
    merge_functions(sources, "tiny_step", {"apps": "tiny"}, path)
    return path, sources


def operations(path, function):
    """Type, result shapes and arguments of all operations but constants, by coremltools' own reader.

    An argument is a constant's value, or the operation and output (or the input) that it comes from.
    """
    spec = load_spec(str(path))
    program = load(spec, spec.specificationVersion, str(path / WEIGHTS))
    sources, found = {name: name for name in program.functions[function].inputs}, []

    def argument(variable):
        constant = variable.op is not None and variable.op.op_type == "const"
        return np.asarray(variable.op.val.val) if constant else sources[variable.name]

    for operation in program.functions[function].operations:
        if operation.op_type == "const":
            continue
        arguments = {}
        for key, given in operation.inputs.items():
            given = given if isinstance(given, list | tuple) else [given]
            arguments[key] = [argument(variable) for variable in given]
        for index, output in enumerate(operation.outputs):
            sources[output.name] = f"{len(found)}.{index}"
        found.append((operation.op_type, [output.shape for output in operation.outputs], arguments))
    return found


def test_every_operation_and_constant_is_what_it_was(merged):
    path, sources = merged
    for name, (package, function) in sources.items():
        before, after = operations(package, function), operations(path, name)
        assert len(before) == len(after) > 20
        assert {"scale", "lut"} <= {key for *_, arguments in after for key in arguments}
        for index, (ours, theirs) in enumerate(zip(after, before, strict=True)):
            assert ours[:2] == theirs[:2] and ours[2].keys() == theirs[2].keys()
            for key, values in ours[2].items():
                for mine, other in zip(values, theirs[2][key], strict=True):
                    np.testing.assert_array_equal(mine, other, err_msg=f"{index} {ours[0]} {key}")


def test_descriptions_of_functions_take_less_and_weights_keep_their_names(merged):
    path, sources = merged
    functions = load_spec(str(path)).mlProgram.functions
    for name, (package, function) in sources.items():
        before = load_spec(str(package)).mlProgram.functions[function]
        assert functions[name].ByteSize() < 0.65 * before.ByteSize()
        stored = [
            {
                o.outputs[0].name
                for o in f.block_specializations["CoreML8"].operations
                if o.type == "const" and o.outputs[0].name.startswith("layers_")
            }
            for f in (before, functions[name])
        ]
        assert stored[0] == stored[1] and len(stored[0]) > 3


def test_what_functions_share_is_stored_once(merged):
    path, sources = merged
    size = (path / WEIGHTS / "weight.bin").stat().st_size
    singles = [(package / WEIGHTS / "weight.bin").stat().st_size for package, _ in sources.values()]
    assert size < 0.7 * sum(singles)
    count, version = struct.unpack("<II", (path / WEIGHTS / "weight.bin").read_bytes()[:8])
    functions = load_spec(str(path)).mlProgram.functions.values()
    operations = [o for f in functions for b in f.block_specializations.values() for o in b.operations]
    values = [binding.value for o in operations for i in o.inputs.values() for binding in i.arguments]
    values += [o.attributes["val"] for o in operations if o.type == "const"]
    offsets = {v.blobFileValue.offset for v in values if v.HasField("blobFileValue")}
    assert (count, version) == (len(offsets), 2)


def test_descriptions_and_metadata_are_those_of_the_functions(merged):
    path, sources = merged
    described = load_spec(str(path)).description
    assert described.defaultFunctionName == "tiny_step" and load_package(path).metadata == {"apps": "tiny"}
    for function in described.functions:
        single = load_spec(str(sources[function.name][0])).description
        for field in ("input", "output", "state"):
            assert list(getattr(function, field)) == list(getattr(single, field))
