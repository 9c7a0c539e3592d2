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
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from ss_device.bundle import Bundle, BundledAdapter, MLXFunctions, exported_functions_file
from ss_device.config import SpeculativeConfig
from ss_device.decoding import Drafter
from ss_device.errors import UserError, library_errors
from ss_device.step_checks import check_prompt, check_tree, kept_rows
from ss_device.step_model import Choose, Proposal, StepLimits, Verified
from ss_device.tree import DraftTree, root_only
from ss_runtime.mlx.decoder import StreamDecoder
from ss_runtime.mlx.function_ids import number_ids
from ss_runtime.mlx.kv_cache import Layers, write_rows
from ss_runtime.mlx.tree_graph import TreeArrays, accepted_row, keep_best_nodes, node_scores, stream_mask
from ss_runtime.settings import RuntimeSettings

LOGIT_LIMIT = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}


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


class FunctionGraph:
    """The function that is traced: dispatches on the names of its inputs."""

    def __init__(self, decoder: StreamDecoder, functions: MLXFunctions) -> None:
        self.decoder, self.functions = decoder, functions

    def __call__(self, **inputs: mx.array) -> list[mx.array]:
        if "lower" in inputs:
            return self.commit(**inputs)
        return self.step(**inputs) if "parents" in inputs else self.prefill(**inputs)

    def prefill(self, tokens, mask, slot, keys, values) -> list[mx.array]:
        kv, positions = _layers(keys, values), slot + mx.arange(tokens.shape[0])
        rows = self.decoder.rows(positions, tokens.shape[0], mask, slot)
        self.decoder.run_layers(self.decoder.embed_rows(tokens, positions), 0, len(kv), rows, kv)
        return _stacked(kv)

    def step(self, tokens, parents, depths, count, mask, slot, keys, values) -> list[mx.array]:
        decoder, kv, size = self.decoder, _layers(keys, values), tokens.shape[0]
        positions = slot + depths
        ancestors = mx.slice(mask, slot, (1,), (size, size))
        tree = TreeArrays(tokens, parents, depths, ancestors, count)
        rows = decoder.rows(positions, size, mask, slot)
        x = decoder.run_layers(decoder.embed_rows(tokens, positions), 0, decoder.first_msa_layer, rows, kv)
        kept = mx.arange(size)
        if size > self.functions.num_kept:
            edges = decoder.early_exit_edges(x, tree, self.functions.prune_over)
            kept = keep_best_nodes(node_scores(tree, edges), self.functions.num_kept)
            x, tree, mask = x[kept], tree.keep(kept), mask[kept]
        x = self._upper(x, tree, mask, slot, kv)
        size = tree.size
        chosen = mx.argmax(decoder.logits(x[:size]), axis=-1).astype(mx.int32)
        accepted = accepted_row(tree, chosen)
        streams = x[size:].reshape(size, -1, x.shape[-1])[accepted][0]
        logits = decoder.logits(streams).astype(mx.float32)
        return [kept.astype(mx.int32), chosen, accepted, logits, *_stacked(kv)]

    def _upper(self, main: mx.array, tree: TreeArrays, mask: mx.array, slot: mx.array, kv: Layers):
        """MSA layers on the kept nodes and their streams. mask [K, S]: what the nodes see of the text."""
        decoder, streams = self.decoder, self.decoder.config.num_streams
        positions = slot + tree.depths
        among = stream_mask(tree.ancestors, streams, decoder.config.main_attends_streams)
        # What the tree's own slots were to the layers below no longer holds: kept nodes have new rows.
        text = mask & (mx.arange(mask.shape[1])[None] < slot)
        seen = mx.concatenate([text, mx.repeat(text, streams, axis=0)], axis=0)
        seen = mx.slice_update(seen, among, slot, (1,))
        anchors = mx.concatenate([positions, mx.repeat(positions, streams)])
        x = mx.concatenate([main, decoder.start_streams(main, positions)], axis=0)
        at = mx.concatenate([positions, decoder.stream_positions(positions)])
        rows = decoder.rows(at, tree.size, seen, slot, anchors)
        return decoder.run_layers(x, decoder.first_msa_layer, len(kv), rows, kv)

    def commit(self, lower, upper, slot, keys, values) -> list[mx.array]:
        first, moved = self.decoder.first_msa_layer, []
        for layer, pair in enumerate(_layers(keys, values)):
            index = slot + (lower if layer < first else upper)
            moved.append(tuple(write_rows(b, mx.take(b, index, axis=2), slot) for b in pair))
        return _stacked(moved)


def _layers(keys: mx.array, values: mx.array) -> Layers:
    return [(keys[i][None], values[i][None]) for i in range(keys.shape[0])]


def _stacked(kv: Layers) -> list[mx.array]:
    return [mx.concatenate([pair[part] for pair in kv], axis=0) for part in (0, 1)]


class FunctionModel:
    """`ss_device.step_model.StepModel` over an imported file: it knows the file and the table above."""

    def __init__(
        self,
        path: Path,
        functions: MLXFunctions,
        config: SpeculativeConfig,
        shape: tuple[int, int, int],
        vocab_size: int,
    ) -> None:
        """shape: layers, key/value heads, head size. Raises UserError for a file that MLX cannot read."""
        self._path = path
        with library_errors(f"{path}: not a readable MLX function"):
            self._run = mx.import_function(str(path))
        self.limits = StepLimits(
            functions.num_nodes,
            functions.num_kept,
            config.num_streams,
            functions.context,
            greedy_only=True,
            vocab_size=vocab_size,
        )
        layers, heads, size = shape
        dtype = getattr(mx, functions.dtype)
        self._functions = functions
        self._buffers = [mx.zeros((layers, heads, functions.slots, size), dtype)] * 2
        self._length, self._kept = 0, None

    def prefill(self, tokens: Sequence[int], choose: Choose | None = None) -> Proposal:
        """As `StepModel.prefill`; the last chunk is padded."""
        check_prompt(self.limits, tokens)
        self._length, self._kept = 0, None
        chunk, before = self._functions.chunk, list(tokens[:-1])
        for start in range(0, len(before), chunk):
            part = before[start : start + chunk]
            padded = np.zeros(chunk, np.int32)
            padded[: len(part)] = part
            self._buffers = self._call(tokens=padded, mask=self._mask(np.tri(chunk, dtype=bool)))
            mx.eval(self._buffers)
            self._length += len(part)
        verified = self.step(root_only(int(tokens[-1])), choose)
        self.commit([0])
        return Proposal(int(verified.chosen[0]), verified.stream_logits)

    def step(self, tree: DraftTree, choose: Choose | None = None) -> Verified:
        """As `StepModel.step`; greedy, the choice is part of the function."""
        if choose is not None:
            raise UserError("exported functions choose greedily: no sampling and no penalties")
        check_tree(self.limits, tree, self._length)
        size = 1 if tree.num_nodes == 1 else self._functions.num_nodes
        columns = np.zeros((3, size), np.int32)
        columns[0], columns[1] = tree.tokens[0], -1
        columns[:, : tree.num_nodes] = tree.tokens, tree.parents, tree.depths
        kept, chosen, accepted, logits, *self._buffers = self._call(
            tokens=columns[0],
            parents=columns[1],
            depths=columns[2],
            count=np.array([tree.num_nodes], np.int32),
            mask=self._mask(tree.ancestor_mask(size)),
        )
        mx.eval(kept, chosen, accepted, logits, self._buffers)
        kept, chosen, accepted = np.array(kept), np.array(chosen), int(kept[accepted.item()].item())
        real = kept < tree.num_nodes
        self._kept = kept[real]
        return Verified(self._kept, chosen[real], accepted, np.array(logits))

    def commit(self, path: Sequence[int]) -> None:
        """As `StepModel.commit`."""
        if self._kept is None:
            raise RuntimeError("commit follows a step")
        lower, upper = np.zeros((2, self._functions.num_nodes), np.int32)
        lower[: len(path)] = path
        upper[: len(path)] = kept_rows(self._kept, path)
        self._buffers = self._call(lower=lower, upper=upper)
        mx.eval(self._buffers)
        self._length += len(path)
        self._kept = None

    def _call(self, **inputs: np.ndarray) -> list[mx.array]:
        keys, values = self._buffers
        arrays = {name: mx.array(array) for name, array in inputs.items()}
        with library_errors(f"{self._path}: the functions are not those that the manifest describes"):
            results = self._run(slot=mx.array([self._length]), keys=keys, values=values, **arrays)
            mx.eval(results)
        return results

    def _mask(self, rows: np.ndarray) -> np.ndarray:
        """bool [R, S]: the committed text, and `rows` [R, R] of what is being written."""
        mask = np.zeros((len(rows), self._functions.slots), bool)
        mask[:, : self._length] = True
        mask[:, self._length : self._length + len(rows)] = rows
        return mask


def open_functions(bundle: Bundle, adapter: BundledAdapter) -> FunctionModel:
    """The adapter's exported functions as a step model."""
    a, functions = bundle.manifest.architecture, adapter.mlxfn
    shape = a.num_layers, a.num_kv_heads, a.head_dim
    return FunctionModel(bundle.path / functions.file, functions, adapter.config, shape, a.vocab_size)


def export_adapter(bundle: Bundle, adapter: BundledAdapter, functions: MLXFunctions, path: Path) -> None:
    """Export an adapter from the MLX weights of a bundle, which need not be whole yet."""
    from ss_runtime.mlx.loading import load_model

    settings = RuntimeSettings(
        dtype=functions.dtype,
        num_nodes=functions.num_nodes,
        num_kept=functions.num_nodes,
        context=functions.context,
        stream_rows="kept",
    )
    model = load_model(bundle, adapter, settings)
    export_functions(model.decoder, functions, getattr(mx, functions.dtype), path)


def first_difference(bundle: Bundle, adapter: BundledAdapter, calls: int) -> str | None:
    """How the file's first calls differ from those of the runtime on the same weights; None: not at all.

    A made-up prompt longer than a chunk, then the runtime's drafts, whose accepted nodes both commit. In
    half precision the comparison ends where one of them alone keeps or accepts a node (a near tie).
    """
    functions, runtime = adapter.mlxfn, _same_runtime(bundle, adapter)
    exported, drafter = open_functions(bundle, adapter), Drafter(functions.num_nodes)
    room = functions.context - (calls + 1) * functions.num_nodes
    vocab = bundle.manifest.architecture.vocab_size
    prompt = np.random.default_rng(0).integers(0, vocab, max(1, min(functions.chunk + 3, room))).tolist()
    ours, theirs = runtime.prefill(prompt), exported.prefill(prompt)
    if not _close(ours.stream_logits, theirs.stream_logits, functions.dtype):
        return "other stream logits after the prompt"
    proposal = ours
    for call in range(1, calls + 1):
        tree = drafter.grow(proposal, frozenset(), functions.num_nodes)
        ours, theirs = runtime.step(tree), exported.step(tree)
        same = ours.accepted_node == theirs.accepted_node and ours.kept.tolist() == theirs.kept.tolist()
        if not same:
            return f"call {call} keeps or accepts other nodes" if functions.dtype == "float32" else None
        if not _close(ours.stream_logits, theirs.stream_logits, functions.dtype):
            return f"other stream logits in call {call}"
        path = tree.path(ours.accepted_node)
        for model in (runtime, exported):
            model.commit(path)
        chosen = ours.chosen[np.searchsorted(ours.kept, ours.accepted_node)]
        proposal = Proposal(int(chosen), ours.stream_logits)
    return None


def _same_runtime(bundle: Bundle, adapter: BundledAdapter):
    """The runtime's own model in the sizes that the functions were exported for."""
    from ss_runtime.mlx.loading import load_model

    functions = adapter.mlxfn
    settings = RuntimeSettings(
        dtype=functions.dtype,
        num_nodes=functions.num_nodes,
        num_kept=functions.num_kept,
        prune_over=functions.prune_over,
        context=functions.context,
        stream_rows="kept",
    )
    return load_model(bundle, adapter, settings)


def _close(ours: np.ndarray, theirs: np.ndarray, dtype: str) -> bool:
    """Equal but for rounding: a share of the largest logit."""
    limit = LOGIT_LIMIT[dtype] * np.abs(ours).max()
    return ours.shape == theirs.shape and bool(np.abs(ours - theirs).max() <= limit)
