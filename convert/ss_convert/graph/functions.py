"""The two functions of an adapter, before any dialect: inputs, state, and what makes outputs of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ss_convert.graph.adapter_inputs import InputWeights, adapter_shapes
from ss_convert.graph.attention import for_attention
from ss_convert.graph.interface import (
    STATE,
    Shapes,
    functions_of,
    num_slots,
    part_prefill_inputs,
    part_state_shape,
    part_step_inputs,
)
from ss_convert.graph.layers import Decoder
from ss_convert.graph.options import GraphOptions, check_adapter
from ss_convert.graph.parts import Part, whole
from ss_convert.graph.prefill_function import build_prefill
from ss_convert.graph.step_function import build_step
from ss_convert.graph.tables import rotary_tables
from ss_convert.graph.weights import BaseWeights, ExportWeights
from ss_device.adapter import Adapter
from ss_device.architecture import Architecture
from ss_device.config import SpeculativeConfig


@dataclass(frozen=True)
class GraphFunction:
    """A function to be written in a dialect.

    inputs: as in `interface.py`; states: the same of the values that outlive a call, `kv_cache` unless it
    is an input like others; body: values by name, states among them, → outputs by name.
    """

    name: str
    inputs: Shapes
    states: Shapes
    body: Callable[[dict], dict]


def base_weights(
    architecture: Architecture, weights: Mapping[str, np.ndarray], options: GraphOptions
) -> BaseWeights:
    """The base as functions with these options store it."""
    return BaseWeights(architecture, weights, options.weights, options.embedding_weights)


def num_positions(config: SpeculativeConfig, options: GraphOptions) -> int:
    """How many positions the rotary tables of an adapter's functions have."""
    # Room for the streams, rounded up so that adapters with other γ share the table.
    return num_slots(options) + -(-(config.num_streams + 1) // 8) * 8


def adapter_functions(
    architecture: Architecture,
    weights: Mapping[str, np.ndarray] | BaseWeights,
    adapter: Adapter,
    options: GraphOptions,
    part: Part | None = None,
) -> tuple[GraphFunction, GraphFunction]:
    """Prefill and step of one part, or of all layers.

    Raises UserError when adapter, base and options do not fit each other or a weight exceeds fp16.
    """
    options.check(architecture)
    check_adapter(adapter)
    config, part = adapter.config, part or whole(architecture)
    if not isinstance(weights, BaseWeights):
        weights = base_weights(architecture, weights, options)
    baked = ExportWeights(architecture, weights, adapter) if options.lora == "baked" else None
    for_prefill, for_step = adapter_shapes(config, architecture, options)
    scaled = for_attention(architecture, options.attention)
    tables = rotary_tables(scaled, num_positions(config, options), options.context)
    tables = {window: tables[window] for window in part.windows(architecture)}
    prefill, step = functions_of(adapter.app, options)

    def decoder(inputs: dict) -> Decoder:
        constants = baked or InputWeights(architecture, weights, adapter, inputs)
        return Decoder(architecture, constants, options, part)

    def prefill_body(inputs: dict) -> dict:
        return build_prefill(decoder(inputs), options, tables, inputs)

    def step_body(inputs: dict) -> dict:
        return build_step(decoder(inputs), config, options, tables, inputs)

    state = ("float16", part_state_shape(architecture, options, part))
    states = {STATE: state} if options.cache == "state" else {}
    prefill_inputs = part_prefill_inputs(architecture, options, part) | for_prefill
    step_inputs = part_step_inputs(config, architecture, options, part) | for_step
    return (
        GraphFunction(prefill, prefill_inputs, states, prefill_body),
        GraphFunction(step, step_inputs, states, step_body),
    )
