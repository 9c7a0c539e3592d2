"""Merged packages, read back by coremltools' own loader: nothing here shares code with the merge."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest
from coremltools.converters.mil.frontend.milproto.load import load
from coremltools.models.utils import load_spec

from ss_convert.coreml.convert import base_weights, build_programs
from ss_convert.coreml.merging import WEIGHTS
from ss_convert.coreml.options import CoreMLOptions
from ss_convert.coreml.package import function_path, merge_functions, read_metadata, save_functions
from ss_device.config import SpeculativeConfig
from tests.tiny_models import make_tiny_base, random_adapter

# Forms of less than a byte leave bits over; every other type of a constant is in every package.
FORMS = (("int4", "lut6"), ("lut4", "int8"))
# The loader names constants of compressed weights itself, and makes one of those that are equal.
INLINE = re.compile("_(data|scale|lut|indices)_[0-9]+$")


@pytest.fixture(scope="module", params=FORMS, ids="-".join)
def merged(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("merged")
    base = make_tiny_base(folder / "base", dtype="float16")
    weights, embedding = request.param
    options = CoreMLOptions(4, 4, 16, 4, weights=weights, embedding_weights=embedding)
    stored = base_weights(base.architecture, base.weights(), options)
    adapter = random_adapter(base, SpeculativeConfig(num_streams=2, num_msa_layers=1))
    programs = build_programs(base.architecture, stored, adapter, options)
    save_functions(programs, folder)
    sources = {name: (function_path(folder, name), "main") for name in programs}
    path = folder / "both.mlpackage"
    merge_functions(sources, "tiny_step", {"apps": "tiny"}, path)
    return path, sources


def constants(path, function):
    """Name and operation → array of a function's constants, by coremltools' own reader."""
    spec = load_spec(str(path))
    program = load(spec, spec.specificationVersion, str(path / WEIGHTS))
    found = {}
    for operation in program.functions[function].operations:
        if operation.op_type == "const":
            found[operation.name, "val"] = np.asarray(operation.outputs[0].val)
        elif operation.op_type.startswith("constexpr_"):
            for name, source in operation.inputs.items():
                found[operation.name, name] = np.asarray(source.val)
    return found


def test_every_constant_is_what_it_was(merged):
    path, sources = merged
    for name, (package, function) in sources.items():
        before, after = constants(package, function), constants(path, name)
        for found in (before, after):
            for key in [key for key in found if key[1] == "val" and INLINE.search(key[0])]:
                del found[key]
        assert before.keys() == after.keys() and len(before) > 20
        assert any(name == "scale" for _, name in before) and any(name == "lut" for _, name in before)
        for key, values in after.items():
            np.testing.assert_array_equal(values, before[key], err_msg=str(key))


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
    assert described.defaultFunctionName == "tiny_step" and read_metadata(path) == {"apps": "tiny"}
    for function in described.functions:
        single = load_spec(str(sources[function.name][0])).description
        for field in ("input", "output", "state"):
            assert list(getattr(function, field)) == list(getattr(single, field))
