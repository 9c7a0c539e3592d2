"""The graph's choices (layout, attention, head in parts, commit, padded state) against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ss_convert.coreml.convert import GraphOptions
from ss_convert.graph.options import PRESETS
from ss_convert.stored_weights import stored_weights
from ss_device.config import SpeculativeConfig, paper_config
from ss_device.errors import UserError
from ss_device.reference.replaced_weights import with_weights
from ss_device.reference.step_model import ReferenceStepModel
from ss_executor import load_package
from tests.convert import cases
from tests.convert.cases import (
    CHUNK,
    CONTEXT,
    Pair,
    compare_caches,
    compare_steps,
    make_coreml,
    prompt_ids,
)
from tests.tiny_models import make_tiny_base, random_adapter

PLUS = SpeculativeConfig(
    num_msa_layers=1, num_streams=2, stream_mlp="base", stream_init_rank=2, stream_lora_rank=3,
    stream_lora_alpha=4.5,
)  # fmt: skip
SHARED = paper_config(
    "shared", num_msa_layers=1, num_streams=2, main_attends_streams=True, lora_rank=2, lora_alpha=3.0
)
GRAPHS = {
    "ane": (PLUS, {**PRESETS["ane"], "head_split": 128}, {"weights": "lut6", "embedding_weights": "lut4"}),
    "ane, LoRA": (SHARED, {**PRESETS["ane"], "prune_over": "vocabulary"}, {"embedding_weights": "int8"}),
    "gpu": (PLUS, PRESETS["gpu"], {"weights": "int4", "embedding_weights": "int8"}),
    "gpu, values turned": (replace(SHARED, value_rotation=0.6), PRESETS["gpu"], {}),
    "ane, values turned": (replace(PLUS, value_rotation=0.6), PRESETS["ane"], {}),
    "conv with gather": (paper_config(num_msa_layers=1), {"layout": "conv", "commit": "gather"}, {}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_base(tmp_path_factory.mktemp("base") / "tiny", dtype="float16", num_hidden_layers=2)


@pytest.fixture
def without_padding(monkeypatch):
    """Padded states hold zeros behind the head's own features; the comparison looks at those."""
    whole = cases.committed_cache

    def cut(model):
        cached = whole(model)
        assert not cached[..., 8:].any()
        return cached[..., :8]

    monkeypatch.setattr(cases, "committed_cache", cut)


@pytest.mark.parametrize("name", GRAPHS)
def test_every_graph_equals_the_reference(base, tmp_path, without_padding, name):
    config, graph, weights = GRAPHS[name]
    adapter = random_adapter(base, config)
    options = GraphOptions(6, 4, CONTEXT, CHUNK, **graph, **weights)
    path = tmp_path / "coreml" / "tiny.mlpackage"
    coreml = make_coreml(base, adapter, options, path)
    dense = stored_weights(path, coreml.functions.step, base.weights(), base.architecture)
    reference = ReferenceStepModel(with_weights(base, dense, adapter), 6, 4, CONTEXT, options.prune_over)
    depths = compare_steps(Pair(path, adapter, coreml, reference), prompt_ids(11), [6] * 6)
    assert max(depths) >= 1
    compare_caches(Pair(path, adapter, coreml, reference))
    _check_operations(load_package(path).functions["tiny_step"], options)


def _check_operations(step, options) -> None:
    """The graph is what its options say."""
    counts = step.op_histogram()
    assert ("linear" in counts) == (options.layout == "linear") and ("conv" in counts) != (
        "linear" in counts
    )
    assert ("scaled_dot_product_attention" in counts) == (options.attention == "fused")
    assert ("softmax" in counts) == (options.attention == "explicit")
    assert step.states["kv_cache"].shape[-1] == (32 if options.pad_state else 8)
    if options.head_split == 128:
        widths = [shape[1] for o in step.block.walk() if o.type == "conv" for _, t in o.outputs
                  for shape in [t.shape]]  # fmt: skip
        assert max(w for w in widths) <= 128


def test_choices_that_do_not_exist_are_refused():
    for changes in ({"layout": "rows"}, {"attention": "flash"}, {"commit": "scatter"}, {"head_split": -1}):
        with pytest.raises(UserError, match=next(iter(changes))):
            GraphOptions(**changes)
