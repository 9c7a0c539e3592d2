"""Decoders as exported MLX functions (`.mlxfn`): a file that MLX runs from Python, C++, C or Swift.

One file per adapter holds four traces of one function, told apart by the names and shapes of their inputs;
weights are stored once. Keys and values are stacked over the layers, [L, n_kv, S, D] with S slots, and
masks have a fixed size, [rows, S]: true where a row sees a slot, its own rows included. All ids are int32.
Every trace takes `slot` [1], `keys` and `values`, and its outputs end with keys and values.

| trace | other inputs | other outputs |
|---|---|---|
| prefill | tokens [P], mask [P, S] | |
| step, 1 node or N | tokens, parents, depths [N], count [1], mask [N, S] | kept [K], chosen [K], |
| | | accepted [1] (a row of kept), stream_logits float32 [γ, V] |
| commit | lower, upper [N] | |

A prefill writes its rows at `slot` and carries no streams. A step writes a tree's rows there (the rest of
N is padding that sees itself), then those of the streams of all kept nodes. Commit moves the rows at
`slot + lower` (layers below the MSA layers) and `slot + upper` (MSA layers) to `slot` and behind; what lies
behind the accepted ones is masked until it is overwritten. MLX writes down the kind of device that a trace
was made on: functions for a Mac's GPU are exported on a Mac.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from ss_device.bundle import Bundle, BundledAdapter, MLXFunctions, exported_functions_file
from ss_device.config import SpeculativeConfig
from ss_runtime.mlx.decoder import StreamDecoder
from ss_runtime.mlx.function_ids import number_ids
from ss_runtime.mlx.kv_cache import Layers, write_rows
from ss_runtime.mlx.step_graph import StepGraph, TextMask
from ss_runtime.mlx.tree_graph import TreeArrays
from ss_runtime.settings import RuntimeSettings


def functions_of(
    app: str,
    config: SpeculativeConfig,
    *,
    num_nodes: int,
    num_kept: int,
    prune_over: str,
    context: int,
    chunk: int,
    dtype: str,
) -> MLXFunctions:
    """The manifest's entry; slots: the context and the rows that the largest call writes behind it."""
    scratch = max(num_nodes, num_kept * (1 + config.num_streams), chunk)
    file = exported_functions_file(app)
    return MLXFunctions(file, dtype, chunk, num_nodes, num_kept, context, context + scratch, prune_over)


def export_functions(decoder: StreamDecoder, functions: MLXFunctions, dtype: mx.Dtype, path: Path) -> None:
    """Write the functions of a decoder whose weights are installed in `dtype`."""
    graph = FunctionGraph(decoder, functions)
    a, slots = decoder.architecture, functions.slots
    buffer = mx.zeros((a.num_layers, a.num_kv_heads, slots, a.head_dim), dtype)
    shared = {"slot": mx.array([0]), "keys": buffer, "values": buffer}

    def ids(count: int) -> mx.array:
        return mx.zeros((count,), mx.int32)

    def mask(rows: int) -> mx.array:
        return mx.ones((rows, slots), dtype=mx.bool_)

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{path.name}")
    mx.eval(decoder.parameters())
    with mx.exporter(str(partial), graph) as exporter:
        exporter(**shared, tokens=ids(functions.chunk), mask=mask(functions.chunk))
        for size in sorted({1, functions.num_nodes}):
            tree = {name: ids(size) for name in ("tokens", "parents", "depths")}
            exporter(**shared, **tree, count=ids(1), mask=mask(size))
        exporter(**shared, lower=ids(functions.num_nodes), upper=ids(functions.num_nodes))
    number_ids(partial)
    os.replace(partial, path)


@dataclass(frozen=True)
class InputMask(TextMask):
    """Who sees the text as the caller of a function says.

    given: bool [N, S], what the tree's nodes see, their own rows included.
    """

    given: mx.array

    def nodes(self, tree: TreeArrays) -> mx.array:
        return self.given

    def rows(self, among: mx.array) -> mx.array:
        # What the tree's own slots were to the layers below no longer holds: kept nodes have new rows.
        text = self.given & (mx.arange(self.slots)[None] < self.length)
        streams = among.shape[0] // text.shape[0] - 1
        seen = mx.concatenate([text, mx.repeat(text, streams, axis=0)], axis=0)
        return mx.slice_update(seen, among, self.length, (1,))

    def keep(self, kept: mx.array) -> InputMask:
        return replace(self, given=self.given[kept])


class FunctionGraph:
    """The function that is traced: dispatches on the names of its inputs."""

    def __init__(self, decoder: StreamDecoder, functions: MLXFunctions) -> None:
        self._graph = StepGraph(decoder, functions.num_kept, functions.prune_over, "kept")
        self._num_lower = decoder.first_msa_layer

    def __call__(self, **inputs: mx.array) -> list[mx.array]:
        if "lower" in inputs:
            return self.commit(**inputs)
        return self.step(**inputs) if "parents" in inputs else self.prefill(**inputs)

    def prefill(self, tokens, mask, slot, keys, values) -> list[mx.array]:
        kv = _layers(keys, values)
        self._graph.prompt_chunk(tokens, slot, mask, kv)
        return _stacked(kv)

    def step(self, tokens, parents, depths, count, mask, slot, keys, values) -> list[mx.array]:
        kv, size = _layers(keys, values), tokens.shape[0]
        ancestors = mx.slice(mask, slot, (1,), (size, size))
        tree = TreeArrays(tokens, parents, depths, ancestors, count)
        outcome = self._graph.step(tree, InputMask(slot, mask.shape[1], mask), kv)
        return [*outcome, *_stacked(kv)]

    def commit(self, lower, upper, slot, keys, values) -> list[mx.array]:
        moved = []
        for layer, pair in enumerate(_layers(keys, values)):
            index = slot + (lower if layer < self._num_lower else upper)
            moved.append(tuple(write_rows(b, mx.take(b, index, axis=2), slot) for b in pair))
        return _stacked(moved)


def _layers(keys: mx.array, values: mx.array) -> Layers:
    return [(keys[i][None], values[i][None]) for i in range(keys.shape[0])]


def _stacked(kv: Layers) -> list[mx.array]:
    return [mx.concatenate([pair[part] for pair in kv], axis=0) for part in (0, 1)]


def settings_of_functions(functions: MLXFunctions) -> RuntimeSettings:
    """Those of the runtime's own model of the same sizes."""
    return RuntimeSettings(
        dtype=functions.dtype,
        num_nodes=functions.num_nodes,
        num_kept=functions.num_kept,
        prune_over=functions.prune_over,
        context=functions.context,
        stream_rows="kept",
    )


def export_adapter(bundle: Bundle, adapter: BundledAdapter, functions: MLXFunctions, path: Path) -> None:
    """Export an adapter from the MLX weights of a bundle, which need not be whole yet."""
    from ss_runtime.mlx.loading import load_model

    model = load_model(bundle, adapter, settings_of_functions(functions))
    export_functions(model.decoder, functions, getattr(mx, functions.dtype), path)
