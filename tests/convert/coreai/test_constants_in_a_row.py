"""Core AI's authoring combines constants in a row, x·c·d → x·(c·d): that may overflow. No graph has any."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("coreai", reason="coreai-core is not installed")

from coreai import authoring as ca

from ss_convert.coreai.asset import _add
from ss_convert.coreai.composites import Composites
from ss_convert.coreai.operations import CoreAIOperations
from ss_convert.graph.functions import GraphFunction, adapter_functions
from ss_convert.graph.operations import op
from ss_convert.graph.options import PRESETS, GraphOptions
from ss_device.config import SpeculativeConfig, paper_config
from tests.families.tiny import make_base
from tests.tiny_models import random_adapter

KINDS = {"add": "sum", "sub": "sum", "mul": "product", "divide": "product"}
CONFIGS = {
    "lossless": paper_config(num_msa_layers=1, num_streams=2),
    "values turned, stream LoRA": SpeculativeConfig(
        num_msa_layers=1, num_streams=2, stream_mlp="base", stream_init_rank=2, stream_lora_rank=3,
        stream_lora_alpha=4.5, value_rotation=0.6,
    ),
}  # fmt: skip


def kind_with_constant(operation) -> str | None:
    """sum or product where one of two operands is a constant."""
    kind = KINDS.get(operation.name.rpartition("broadcasting_")[2])
    constant = [getattr(v.owner, "name", None) == "coreai.constant" for v in operation.operands]
    return kind if kind and sum(constant) == 1 else None


def in_a_row(block) -> Iterator[str]:
    """Operations of a block and of those inside that take what such an operation with a constant gave."""
    for view in block.operations:
        operation = view.operation
        for region in operation.regions:
            for inner in region.blocks:
                yield from in_a_row(inner)
        if (kind := kind_with_constant(operation)) is None:
            continue
        makers = [v.owner for v in operation.operands if hasattr(v.owner, "operands")]
        if any(kind_with_constant(maker) == kind for maker in makers):
            yield str(operation)


def found_in(functions: list[GraphFunction], half_only: bool) -> list[str]:
    module = ca.Module.create()
    with module:
        operations = CoreAIOperations(Composites(module), half_only)
        for function in functions:
            _add(function, operations)
        return list(in_a_row(module._body))


def test_constants_in_a_row_are_found():
    def body(values: dict) -> dict:
        twice = op.mul(op.mul(values["x"], np.float16(2)), np.float16(3))
        return {"product": twice, "sum": op.sub(op.add(twice, np.float16(2)), np.float16(3))}

    function = GraphFunction("rows", {"x": ("float16", (3,))}, {}, body)
    assert len(found_in([function], half_only=False)) == 2


@pytest.mark.parametrize("preset", ["gpu", "ane"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("family", ["gemma2", "qwen3", "opt"])
def test_no_graph_has_constants_in_a_row(family, config, preset, tmp_path):
    base = make_base(family, tmp_path)
    adapter = random_adapter(base, CONFIGS[config])
    options = GraphOptions(6, 4, 48, 8, **PRESETS[preset])
    functions = adapter_functions(base.architecture, base.weights(), adapter, options)
    assert found_in(list(functions), half_only=preset == "ane") == []
