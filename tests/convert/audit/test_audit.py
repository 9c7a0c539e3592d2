"""The audit: costs counted by hand, planted hazards found, reports, and Core ML's plan by a stand-in."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.proto import Model_pb2

from ss_convert.audit import command
from ss_convert.audit.devices import DEVICES, Device
from ss_convert.audit.html import to_html
from ss_convert.audit.placement import placement
from ss_convert.audit.report import audit
from ss_convert.audit.rules import RULES, hazards
from ss_convert.command import main as ss_convert
from ss_convert.coreml.convert import GraphOptions, write_package
from ss_device.base_model import open_base
from ss_device.config import SpeculativeConfig
from ss_device.errors import UserError
from ss_executor import load_package
from tests.executor.harness import save_program
from tests.tiny_models import make_tiny_base, random_adapter

DEVICE = Device("test", "ane", bandwidth=1.0, compute=0.001, overhead=2.0, source="made up")
RNG = np.random.default_rng(0)


def half(*shape) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float16)


FIRST, SECOND = half(48, 32), half(16, 48)


def small_graph(x, ids, cache):
    """Two products around a gather, a state of 4 rows that is written and read."""
    hidden = mb.linear(x=x, weight=FIRST, name="layers_0_attn_q")
    rows = mb.gather(x=hidden, indices=ids, axis=0, name="planted_gather")
    result = mb.linear(x=rows, weight=SECOND)
    old = mb.read_state(input=cache)
    new = mb.slice_update(x=old, update=result, begin=[0, 0], end=[4, 16])
    stored = mb.coreml_update_state(state=cache, value=new)
    return [mb.softmax(x=mb.slice_by_size(x=stored, begin=[2, 0], size=[4, 16]), axis=-1)]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "small.mlpackage"
    inputs = {"x": half(4, 32), "ids": np.zeros(4, np.int32)}
    save_program(path, small_graph, inputs, states={"cache": (8, 16)})
    return path


def test_costs_of_a_call_are_those_counted_by_hand(small):
    [package] = audit(small, "ane", DEVICE).packages
    [function] = package.functions
    costs = function.costs
    assert costs.flops == 2 * 4 * 32 * 48 + 2 * 4 * 48 * 16 + 5 * 4 * 16
    weights = 2 * (48 * 32 + 16 * 48 + 48 + 16)  # matrices and biases
    assert weights <= costs.weight_bytes < weights + 100  # begins, ends, axes
    assert costs.state_bytes == 2 * 4 * 16 + 2 * 4 * 16
    assert package.state_bytes == 2 * 8 * 16
    assert function.operations["linear"] == 2 and function.operations["gather"] == 1
    moved = costs.weight_bytes + costs.state_bytes
    assert function.seconds["memory"] == pytest.approx(moved / 1e9)
    assert function.seconds["compute"] == pytest.approx(costs.flops / 1e9)
    assert function.seconds["step"] == pytest.approx(max(moved, costs.flops) / 1e9 + 2e-3)
    assert costs.intensity == pytest.approx(costs.flops / moved)


def found(package, engine: str) -> dict[str, list]:
    hazards: dict[str, list] = {}
    for hazard in audit(package, engine, DEVICE).packages[0].hazards:
        hazards.setdefault(hazard.rule, []).append(hazard)
    return hazards


def test_a_planted_gather_between_products_is_found_and_named(small):
    hazards = found(small, "ane")
    [gather] = hazards["cpu-op"]
    assert (gather.function, gather.operation) == ("main", "gather")
    assert "planted_gather" in gather.where and gather.source and "transfers" in gather.detail
    assert set(hazards) == {"cpu-op", "linear", "state-width"}
    assert "16 is no multiple of 32" in hazards["state-width"][0].detail
    assert set(found(small, "gpu")) == {"explicit-attention"}


def planted(x, begin, a, b, c):
    """One place for every rule that a small graph can hold."""
    query = mb.reshape(x=mb.linear(x=x, weight=half(32, 32)), shape=[1, 4, 32])
    mixed = mb.scaled_dot_product_attention(query=query, key=query, value=query, name="fused")
    masked = mb.add(x=mb.squeeze(x=mixed, axes=[0]), y=np.float16([0, -np.inf] * 16))
    precise = mb.cast(x=mb.cast(x=masked, dtype="fp32", name="wide"), dtype="fp16")
    column = mb.reshape(x=mb.tile(x=precise, reps=[8, 1]), shape=[32, 32, 1], name="column")
    head = mb.linear(x=precise, weight=half(16385, 32), name="big_head")
    rows = mb.slice_update(
        x=mb.read_state(input=a),
        update=half(128, 32),
        begin=begin,
        end=mb.add(x=begin, y=np.int32([128, 32])),
    )
    stored = mb.coreml_update_state(state=a, value=rows)
    states = [mb.reduce_sum(x=mb.read_state(input=state), axes=[0, 1], keep_dims=True) for state in (b, c)]
    table = mb.conv(
        x=mb.reshape(x=precise, shape=[1, 32, 1, 4]), weight=half(8, 32, 1, 1), name="pointwise"
    )
    return [head, mb.reduce_sum(x=stored, axes=[0, 1], keep_dims=True), column, table, *states]


def test_every_rule_names_its_planted_place(tmp_path):
    path = tmp_path / "planted.mlpackage"
    inputs = {"x": half(4, 32), "begin": np.zeros(2, np.int32)}
    save_program(path, planted, inputs, states={"a": (256, 32), "b": (4, 32), "c": (4, 32)})
    ane, gpu = found(path, "ane"), found(path, "gpu")
    expected = {
        "fused-attention": "fused", "float32": "wide", "singleton-axis": "column", "wide-head": "big_head",
        "many-states": "a, b, c",
    }  # fmt: skip
    for rule, where in expected.items():
        assert where in ane[rule][0].where, rule
    assert "16385" in ane["wide-head"][0].detail and "128 rows" in ane["update-rows"][0].detail
    assert ane["not-finite"] and ane["linear"]
    assert "pointwise" in gpu["conv"][0].where
    assert set(gpu) == {"conv", "not-finite", "update-rows"}


def scattered(x, ids):
    """A scatter by index vector, and a table whose own entries are compressed."""
    new = half(2, 32)
    rows = mb.scatter(data=x, indices=ids, updates=new, axis=0, mode="update", name="planted_scatter")
    table = mb.constexpr_blockwise_shift_scale(
        data=RNG.integers(-8, 8, (1, 1, 16, 1)).astype(np.int8), scale=half(1, 1, 1, 1)
    )
    indices = RNG.integers(0, 16, (8, 32)).astype(np.uint8)
    weight = mb.constexpr_lut_to_dense(indices=narrow(indices, 4), lut=table, name="doubly")
    return [mb.linear(x=rows, weight=weight, name="product")]


def narrow(values: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned integers of fewer bits, as coremltools takes them."""
    return values.astype(types.nptype_from_builtin(types.get_nbits_int_builtin_type(bits, False)))


def edited(path, change):
    """The package with its description changed: shapes that coremltools refuses to write."""
    file = path / "Data/com.apple.CoreML/model.mlmodel"
    spec = Model_pb2.Model()
    spec.ParseFromString(file.read_bytes())
    change(spec.mlProgram.functions["main"])
    file.write_bytes(spec.SerializeToString())
    return path


def odd_shapes(function):
    """An input whose first size is not fixed, a result of six axes."""
    function.inputs[0].type.tensorType.dimensions[0].unknown.variadic = False
    [block] = function.block_specializations.values()
    result = next(o for o in block.operations if o.type == "linear").outputs[0]
    result.type.tensorType.rank += 4
    for _ in range(4):
        result.type.tensorType.dimensions.add().constant.size = 1


def test_rules_for_scatter_shapes_rank_and_chained_compression(tmp_path):
    path = tmp_path / "odd.mlpackage"
    save_program(path, scattered, {"x": half(4, 32), "ids": np.zeros(2, np.int32)})
    for engine in ("ane", "gpu"):
        hazards_of = found(path, engine)
        assert "planted_scatter" in hazards_of["scatter"][0].where
        [chained] = hazards_of["chained-compression"]
        assert chained.where == "doubly" and "constexpr_blockwise_shift_scale" in chained.detail
        assert not {"rank", "unknown-shape"} & set(hazards_of)
    edited(path, odd_shapes)
    ane, gpu = found(path, "ane"), found(path, "gpu")
    assert ane["unknown-shape"][0].where == "x" and "None" in ane["unknown-shape"][0].detail
    assert "product" in ane["rank"][0].where and ane["rank"][0].detail == "rank 6"
    assert "rank" in gpu and "unknown-shape" not in gpu


def test_a_large_file_leaves_the_neural_engine():
    [large] = hazards([], "ane", 1_500_000_000)
    assert (large.rule, large.where) == ("large-file", "weight.bin") and "1.50 GB" in large.detail
    assert hazards([], "ane", 1_000_000_000) == [] and hazards([], "gpu", 1_500_000_000) == []


def test_every_source_can_be_looked_up():
    for source in [rule.source for rule in RULES] + [hazards([], "ane", 2_000_000_000)[0].source]:
        named = ("issue", "pull request", "docs/", "documentation", "Apple, ", "coremltools")
        assert any(word in source for word in named), source


CONFIG = SpeculativeConfig(num_streams=2, num_msa_layers=1)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """A package of the builder with int4 weights."""
    folder = tmp_path_factory.mktemp("decoder")
    base = make_tiny_base(folder / "base", dtype="float16", vocab_size=1200, num_hidden_layers=2)
    path = folder / "coreml" / "tiny.mlpackage"
    options = GraphOptions(4, 4, 16, 6, weights="int4", embedding_weights="int8")
    write_package(base.architecture, base.weights(), random_adapter(base, CONFIG), options, path)
    return path


def random_adapter_of(decoder):
    """The adapter that is in the package."""
    return random_adapter(open_base(decoder.parent.parent / "base"), CONFIG)


def test_a_decoder_is_read_by_layers_and_kinds(decoder):
    [package] = audit(decoder, "ane", DEVICE).packages
    by_name = {function.name: function for function in package.functions}
    rows = by_name["tiny_step"].costs.rows
    # 4 nodes below; 4 nodes and their 8 streams above; the head takes 4 nodes and 2 streams.
    assert rows == {"layer 0": 4, "layer 1": 12, "head": 6}
    assert by_name["tiny_prefill"].costs.rows == {"layers 0–1": 6}
    assert package.kinds["embedding and head"] == 1200 * 32 + 2 * 1200
    feed_forward = 2 * 3 * 32 * 48
    assert feed_forward / 2 < package.kinds["feed-forward"] < feed_forward * 0.7
    assert sum(package.kinds.values()) <= package.weight_bytes + 4000
    int4 = [h for h in package.hazards if h.rule == "int4-blocks"]
    assert {h.operation for h in int4} == {"constexpr_blockwise_shift_scale"}
    assert any("mlp_down" in h.where for h in int4) and not any("embed" in h.where for h in int4)


def test_own_bytes_of_the_only_adapter_are_its_tensors(decoder):
    [package] = audit(decoder, "ane", DEVICE).packages
    adapter = random_adapter_of(decoder)
    # Nothing is pruned, so the pruning head is not in the package.
    streams = 2 * sum(tensor.size for name, tensor in adapter.tensors.items() if name.startswith("stream"))
    assert package.own_bytes == {"tiny": streams} and package.kinds["stream parts"] == streams
    total = package.shared_bytes + streams
    assert package.weight_bytes - 64 * 200 < total <= package.weight_bytes


def test_shared_mode_and_pruning_are_kinds_of_their_own(tmp_path):
    base = make_tiny_base(tmp_path / "base", dtype="float16", num_hidden_layers=2)
    config = SpeculativeConfig(
        mode="shared", num_streams=2, num_msa_layers=1, lora_rank=2, lora_alpha=2.0, pruning_rank=3
    )
    adapter = random_adapter(base, config)
    path = tmp_path / "coreml" / "tiny.mlpackage"
    write_package(base.architecture, base.weights(), adapter, GraphOptions(4, 3, 16, 6), path)
    [package] = audit(path, "ane", DEVICE).packages
    lora = 2 * sum(a.size + b.size for a, b in adapter.lora.values())
    assert package.kinds["LoRA"] == lora and package.kinds["pruning head"] == 2 * 2 * 3 * 32
    assert package.own_bytes["tiny"] == lora + package.kinds["pruning head"] + package.kinds["stream parts"]


@pytest.mark.parametrize(("attention", "engine"), [("fused", "gpu"), ("explicit", "ane")])
def test_the_engine_of_a_package_is_that_of_its_attention(decoder, tmp_path, capsys, attention, engine):
    path = shutil.copytree(decoder, tmp_path / "said.mlpackage")
    file = path / "Data/com.apple.CoreML/model.mlmodel"
    spec = Model_pb2.Model()
    spec.ParseFromString(file.read_bytes())
    spec.description.metadata.userDefined["attention"] = attention
    file.write_bytes(spec.SerializeToString())
    assert ss_convert(["audit", str(path), "--overhead", "0", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["engine"] == facts["device"]["engine"] == engine and facts["device"]["overhead"] == 0


def test_command_prints_text_json_and_a_self_contained_page(decoder, tmp_path, capsys):
    page = tmp_path / "audit.html"
    assert ss_convert(["audit", str(decoder), "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert "tiny_step" in text and "int4-blocks" in text and "coremltools issue 2510" in text
    arguments = [
        "audit",
        str(decoder),
        "--engine",
        "gpu",
        "--bandwidth",
        "200",
        "--overhead",
        "1.5",
        "--json",
    ]
    assert ss_convert(arguments) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["device"]["bandwidth"] == 200 and "given by the user" in facts["device"]["source"]
    step = facts["packages"][0]["functions"]["tiny_step"]
    assert step["seconds"]["step"] > 1.5e-3 and step["operations"]["linear"] > 10
    assert facts["num_hazards"] == len(facts["packages"][0]["hazards"])
    html = page.read_text()
    assert html.startswith("<!doctype html>") and "http" not in html.replace(
        "http://www.w3.org/2000/svg", ""
    )
    drawings = html.split("<svg")[1:]
    assert len(drawings) >= 6
    for drawing in drawings:
        ElementTree.fromstring("<svg" + drawing.split("</svg>")[0] + "</svg>")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--device", "toaster"), ("unknown device 'toaster'", *list(DEVICES)[:2])),
        (("--bandwidth", "0"), ("0 is not above 0",)),
        (("--overhead", "-3"), ("-3 is not a number from 0 up",)),
        (("--engine", "gpu", "--device", "m1-ane"), ("--device m1-ane", "engine 'ane'", "for 'gpu'")),
        (("--html", "no/such/folder.html"), ("no such folder",)),
    ],
)
def test_bad_input_is_one_line(decoder, capsys, more, says):
    assert ss_convert(["audit", str(decoder), *more]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(part in error for part in says)


def test_what_is_no_bundle_is_refused(tmp_path, capsys):
    for source, says in ((tmp_path, "neither a bundle"), (tmp_path / "x.mlpackage", "no such package")):
        assert ss_convert(["audit", str(source)]) == 2
        assert says in capsys.readouterr().err


class MLCPUComputeDevice:
    """Named as coremltools names its devices."""


class MLNeuralEngineComputeDevice:
    """Named as coremltools names its devices."""


class StandIn:
    """What `placement` asks coremltools for, on the executor: gathers go to the CPU."""

    def compute_plan(self, package, engine):
        loaded = load_package(package)
        functions = {
            name: SimpleNamespace(
                block=SimpleNamespace(
                    operations=[SimpleNamespace(operator_name=o.type) for o in function.block.operations]
                )
            )
            for name, function in loaded.functions.items()
        }
        return SimpleNamespace(
            model_structure=SimpleNamespace(program=SimpleNamespace(functions=functions)),
            get_compute_device_usage_for_mlprogram_operation=self.usage,
            get_estimated_cost_for_mlprogram_operation=lambda _: SimpleNamespace(weight=0.125),
        )

    def usage(self, operation):
        if operation.operator_name == "const":
            return None
        on_cpu = operation.operator_name == "gather"
        device = MLCPUComputeDevice() if on_cpu else MLNeuralEngineComputeDevice()
        return SimpleNamespace(preferred_compute_device=device)

    def model(self, package, function, engine):
        program = load_package(package).program(function)
        return SimpleNamespace(make_state=program.make_state, predict=program.predict)


def test_core_ml_placement_through_its_documented_interface(small):
    functions = load_package(small).functions
    [found] = placement(small, functions, "ane", StandIn()).values()
    assert found["devices"]["CPU"] == 1 and found["on_cpu"] == {"gather": 1}
    assert found["devices"]["NeuralEngine"] >= 5
    assert found["cost_shares"]["CPU"] == 0.125 and 0 < found["seconds"] < 1
    report = command.with_placement(audit(small, "ane", DEVICE), small, StandIn())
    assert report.to_dict()["packages"][0]["placement"]["main"]["on_cpu"] == {"gather": 1}
    page = to_html(report)
    places = report.packages[0].placement["main"]
    for text in (f"main: {1e3 * places['seconds']:.3f} ms", "12.5%", "Operations on the CPU: gather 1."):
        assert text in page, text
    assert "Only what stands under" in page and "Nothing here was measured" not in page
    assert "Nothing here was measured" in to_html(audit(small, "ane", DEVICE))


@pytest.mark.parametrize("call", ["compute_plan", "model"])
def test_what_core_ml_refuses_is_one_line(small, monkeypatch, call):
    def refuse(self, *arguments):
        raise Exception("Error compiling model:\n  no such engine")

    monkeypatch.setattr(StandIn, call, refuse)
    with pytest.raises(UserError, match="Core ML refused it .Error compiling model: no such engine"):
        placement(small, load_package(small).functions, "ane", StandIn())
