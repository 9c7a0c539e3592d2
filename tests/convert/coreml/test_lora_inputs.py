"""Adapters as inputs: one pair of functions, several adapters, each as its own reference."""

from __future__ import annotations

import numpy as np
import pytest

from ss_convert.coreml.convert import GraphOptions, write_package
from ss_device.adapter_inputs import input_values, place_of
from ss_device.config import paper_config, tensor_shapes
from ss_device.reference.step_model import ReferenceStepModel
from ss_executor import load_package
from ss_runtime.function_step_model import FunctionStepModel
from tests.convert.cases import CONTEXT, Pair, compare_steps, prompt_ids, reference_model
from tests.tiny_models import make_tiny_base, random_adapter

RANK = 4
# What the functions are built for: settings, nodes kept of 6, the graph's choices.
FORMS = {
    "linear": ({}, 6, {}),
    "pruned": ({"stream_init_rank": 2}, 4, {"weights": "int8", "embedding_weights": "int8"}),
    "conv, gated": (
        {"main_attends_streams": True, "stream_lora_rank": 2, "stream_lora_alpha": 6.0},
        6,
        {"layout": "conv"},
    ),
    "stream adapters": ({"stream_mlp": "adapter", "stream_adapter_rank": 2}, 6, {"attention": "fused"}),
}


def settings(rank, alpha, **changes):
    return paper_config(
        "shared", num_streams=2, num_msa_layers=2, lora_rank=rank, lora_alpha=alpha, **changes
    )


def tensors_of(adapter):
    return adapter.tensors | adapter.lora_tensors()


@pytest.mark.parametrize("form", FORMS)
def test_adapters_of_one_pair_of_functions_equal_their_references(tmp_path, form):
    changes, kept, choices = FORMS[form]
    base = make_tiny_base(tmp_path / "base", dtype="float16")
    # Ranks below, at and scales unlike what the functions were built with.
    configs = [settings(4, 8.0, **changes), settings(2, 6.0, **changes), settings(3, 1.5, **changes)]
    adapters = [random_adapter(base, config, seed) for seed, config in enumerate(configs)]
    options = GraphOptions(6, kept, CONTEXT, 8, lora="inputs", lora_rank=RANK, **choices)
    path = tmp_path / "coreml" / "tiny.mlpackage"
    functions = write_package(base.architecture, base.weights(), adapters[0], options, path)
    assert (functions.prefill, functions.step) == ("adapter_prefill", "adapter_step")
    assert (functions.lora, functions.lora_rank) == ("inputs", RANK)
    programs = [load_package(path).program(name, "float32") for name in (functions.prefill, functions.step)]
    texts = set()
    for adapter in adapters:
        values = input_values(tensors_of(adapter), adapter.config, base.architecture, RANK, options.prunes)
        coreml = FunctionStepModel(*programs, functions, adapter.config, base.architecture, values)
        model = reference_of(base, adapter, path, functions, options)
        compare_steps(Pair(path, adapter, coreml, model), prompt_ids(11), [6] * 4)
        texts.add(coreml.prefill(prompt_ids(11)).stream_logits.tobytes())
    assert len(texts) == len(adapters)


def reference_of(base, adapter, path, functions, options):
    if not options.compresses:
        model = reference_model(base, adapter)
    else:
        from ss_convert.stored_weights import stored_weights
        from ss_device.reference.replaced_weights import with_weights

        dense = stored_weights(path, functions.step, base.weights(), base.architecture)
        model = with_weights(base, dense, adapter)
    return ReferenceStepModel(model, 6, options.num_kept, CONTEXT, options.prune_over)


def test_every_tensor_has_one_place_and_padding_is_zero(tmp_path):
    base = make_tiny_base(tmp_path / "base")
    adapter = random_adapter(base, settings(3, 6.0, stream_lora_rank=2, stream_lora_alpha=2.0))
    tensors = tensors_of(adapter)
    values = input_values(tensors, adapter.config, base.architecture, RANK, prunes=True)
    assert place_of("lora.layers.12.mlp.down.b") == ("lora_down_b", 12)
    assert len({place_of(name) for name in tensors}) == len(tensors)
    sums = sum(float(np.abs(v.astype(np.float64)).sum()) for n, v in values.items() if n != "lora_scale")
    own = {n: t.astype(np.float16) for n, t in tensors.items()}
    assert sums == pytest.approx(sum(float(np.abs(t.astype(np.float64)).sum()) for t in own.values()))
    assert values["lora_scale"] == 2.0 and not values["lora_q_a"][:, 3:].any()
    assert set(tensor_shapes(adapter.config, base.architecture)) <= set(tensors)
