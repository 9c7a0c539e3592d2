"""The step model on MLX: prefill, step and commit over a StreamDecoder, one host read per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from weakref import ref

import mlx.core as mx
import numpy as np

from ss_device.architecture import Architecture
from ss_device.config import PRUNE_OVER, SpeculativeConfig
from ss_device.errors import UserError
from ss_device.step_checks import check_prompt, check_tree, kept_rows
from ss_device.step_model import Choose, Proposal, StepLimits, Verified
from ss_device.tree import DraftTree, root_only
from ss_runtime.mlx.decoder import StreamDecoder
from ss_runtime.mlx.kv_cache import KVCache, Layers
from ss_runtime.mlx.step_graph import Decide, StepGraph, TextMask, argmax_tokens
from ss_runtime.mlx.tree_graph import TreeArrays
from ss_runtime.settings import DTYPES, STREAM_ROWS, RuntimeSettings

BUCKET = 256
PREFILL_CHUNK = 256
SLOTS = 32  # unit of what a step that is not compiled reads of the buffers, in tokens


class MLXStepModel:
    """`ss_device.step_model.StepModel` over MLX arrays, one sequence.

    base_arrays, adapter_arrays: canonical names → numpy or MLX arrays, cast to `dtype` (None: float16).
    num_nodes must be said; num_kept None: all of them, no pruning; context None:
    `Architecture.default_context`.

    stream_rows (None: `kept`) says which nodes carry streams in a step. `kept`: all of them, in the same
    pass, as in the paper. `accepted`: only the node where the walk ends, in a second pass of γ rows over
    the MSA layers; the same drafts for fewer rows, more reads of those layers' weights. `none`: no drafts,
    [0, V] stream logits: plain decoding. The main stream must not attend to streams for the last two.

    `bucket` is the unit by which buffers grow, in tokens. A compiled step is traced once per tree size and
    buffer length, so trees are then padded to a power of two (or N), and it reads whole buffers. By default
    it is compiled on a GPU and not on a CPU, where MLX runs a C++ compiler for every fused kernel it meets
    and where every row and slot costs. kv_bits: keys and values are kept in so few (4 or 8; None: `dtype`).

    Raises UserError for settings or arrays that do not fit.
    """

    def __init__(
        self,
        architecture: Architecture,
        config: SpeculativeConfig,
        base_arrays: dict,
        adapter_arrays: dict,
        settings: RuntimeSettings,
    ) -> None:
        settings = _with_defaults(settings, architecture)
        _check_settings(config, settings)
        config.check(architecture)
        stream_rows, dtype = settings.stream_rows, getattr(mx, settings.dtype)
        self.limits = StepLimits(
            settings.num_nodes,
            settings.num_kept,
            config.num_streams,
            settings.context,
            defers_streams=stream_rows == "accepted",
            vocab_size=architecture.vocab_size,
        )
        self.config, self.prune_over, self.stream_rows = config, settings.prune_over, stream_rows
        heads = architecture.num_kv_heads, architecture.head_dim
        self.cache = KVCache(architecture.num_layers, *heads, dtype, settings.bucket, settings.kv_bits)
        self.decoder = StreamDecoder(architecture, config, settings.context)
        self.decoder.install(base_arrays, adapter_arrays, dtype)
        self._kept: np.ndarray | None = None
        self._drafting: mx.array | None = None  # [1, h], of a step whose streams were put off
        self._compiled = settings.compiled
        if not self._compiled and stream_rows == "accepted":
            self.decoder.merge_stream_lora()
        self.keep(settings.num_kept)

    def keep(self, num_kept: int) -> None:
        """Keep at most so many nodes of a step's tree from now on (num_nodes: no pruning)."""
        _check_kept(num_kept, self.limits.num_nodes)
        self.limits = replace(self.limits, num_kept=num_kept)
        self._graph = StepGraph(self.decoder, num_kept, self.prune_over, self.stream_rows)
        steps = (False, True) if self._compiled else ()
        self._compiled_steps = {defer: self._compile(defer) for defer in steps}

    def _compile(self, defer: bool):
        """`_step_graph`, compiled, which must not hold this model: a cycle would keep its weights until the
        next collection of garbage. Weights are listed as captured inputs: otherwise a later change of a
        weight would be ignored."""
        model = ref(self)
        return mx.compile(lambda *inputs: model()._step_graph(*inputs, defer=defer), inputs=self.decoder)

    def prefill(
        self, tokens: Sequence[int], choose: Choose | None = None, reuse: int = 0, defer: bool = False
    ) -> Proposal:
        """Take the prompt: all but its last token in chunks without streams, the last as a tree's root.

        Forgets the text before but its first `reuse` tokens, which the caller knows to be the prompt's
        (`ss_runtime.mlx.cached_text`). → the first root and the streams of the last prompt token.
        """
        check_prompt(self.limits, tokens)
        self.cache.reset()
        self.cache.length = reuse
        self._kept = None
        self.cache.reserve(len(tokens) - reuse + self._graph.scratch_rows(1))
        for start in range(reuse, len(tokens) - 1, PREFILL_CHUNK):
            self._take_chunk(tokens[start : min(start + PREFILL_CHUNK, len(tokens) - 1)])
        verified = self.step(root_only(int(tokens[-1])), choose, defer)
        self.commit([0])
        return Proposal(int(verified.chosen[0]), verified.stream_logits)

    def step(self, tree: DraftTree, choose: Choose | None = None, defer: bool = False) -> Verified:
        """Verify a tree of at most N nodes (docs/method.md, One decoding step).

        Changes nothing until `commit`. With `choose` the step is not compiled and reads the logits of all
        nodes to the host. defer: leave the accepted node's streams to `streams`, if they are asked for.
        """
        check_tree(self.limits, tree, self.cache.length)
        if defer and not self.limits.defers_streams:
            raise ValueError(f"stream_rows '{self.stream_rows}' cannot defer streams")
        size = self._padded_size(tree.num_nodes)
        self.cache.reserve(self._graph.scratch_rows(size))
        arrays, ancestors = _upload(tree, size)
        length = mx.array([self.cache.length])
        decide = argmax_tokens if choose is None else partial(_choose_on_host, choose, tree.num_nodes)
        run = partial(self._step_graph, decide=decide, defer=defer)
        if self._compiled and choose is None:
            run = self._compiled_steps[defer]
        # The buffers are handed over, not shared: MLX then writes the rows in place.
        kv, self.cache.layers = self.cache.layers, []
        outcome, drafted, self.cache.layers = run(arrays, ancestors, length, kv)
        del kv
        mx.eval(outcome, drafted, self.cache.layers)
        self._drafting = drafted if defer else None
        logits = np.zeros((0, 0), np.float32) if defer else np.array(drafted)
        return self._verified(tree, np.array(outcome), logits)

    def streams(self) -> np.ndarray:
        """Stream logits float32 [γ, V] of the node that the last step accepted, after its commit.

        For a step that put them off. They see what is committed, and change nothing.
        """
        if self._drafting is None or self._kept is not None:
            raise RuntimeError("deferred streams follow the commit of their step")
        rows = self._graph.leaders + self.limits.num_streams
        self.cache.reserve(rows)
        length, nobody = mx.array([self.cache.length]), mx.zeros((1, 0), mx.bool_)
        kv, self.cache.layers = list(self.cache.layers), []
        text, nowhere = TextMask(length, self._slots(kv, rows)), mx.zeros((0,), mx.int32)
        logits = self._graph.node_streams(self._drafting, length - 1, nobody, nowhere, text, kv)
        logits = logits.astype(mx.float32)
        self.cache.layers = kv
        mx.eval(logits, kv[self.decoder.first_msa_layer :])
        return np.array(logits)

    def commit(self, path: Sequence[int]) -> None:
        """Keep the keys and values of these nodes (root first) of the last tree.

        After pruning the lower layers hold all of the tree's rows and the MSA layers the kept ones.
        """
        if self._kept is None:
            raise RuntimeError("commit follows a step")
        lower = [int(node) for node in path]
        upper = [int(row) for row in kept_rows(self._kept, lower)]
        num_lower = self.decoder.first_msa_layer
        self.cache.commit([lower] * num_lower + [upper] * self.config.num_msa_layers)
        self._kept = None

    def _verified(self, tree: DraftTree, outcome: np.ndarray, stream_logits: np.ndarray) -> Verified:
        """Undo the padding: `outcome` int32 is [kept ids | chosen tokens | row of the accepted node]."""
        kept, chosen = np.split(outcome[:-1], 2)
        accepted_node = int(kept[outcome[-1]])
        real = kept < tree.num_nodes
        self._kept = kept[real]
        return Verified(kept[real], chosen[real], accepted_node, stream_logits)

    def _padded_size(self, num_nodes: int) -> int:
        if not self._compiled:
            return num_nodes
        return min(1 << (num_nodes - 1).bit_length(), self.limits.num_nodes)

    def _slots(self, kv: Layers, rows: int) -> int:
        """How many slots of the buffers a pass reads that writes `rows` rows behind the text."""
        capacity, used = kv[0][0].shape[2], self.cache.length + rows
        return capacity if self._compiled else min(capacity, -(-used // SLOTS) * SLOTS)

    def _take_chunk(self, tokens: Sequence[int]) -> None:
        """Commit prompt tokens that carry no streams."""
        count, length = len(tokens), mx.array([self.cache.length])
        kv, self.cache.layers = self.cache.layers, []
        text = TextMask(length, self._slots(kv, count))
        mask = text.rows(mx.tri(count, dtype=mx.bool_))
        self._graph.prompt_chunk(mx.array(list(tokens)), length, mask, kv)
        self.cache.layers = kv
        self.cache.length += count
        mx.eval(kv)

    def _step_graph(
        self,
        arrays: mx.array,
        ancestors: mx.array,
        length: mx.array,
        kv: Layers,
        decide: Decide = argmax_tokens,
        defer: bool = False,
    ) -> tuple[mx.array, mx.array, Layers]:
        """The whole step. arrays int32 [4, N]: tokens, parents, depths, and the count of real nodes.

        → outcome int32 [2K + 1], stream logits float32 [γ, V], buffers. With `defer`, instead of stream
        logits the accepted node's row [1, h] at the first MSA layer's input.
        """
        kv, tree = list(kv), TreeArrays(arrays[0], arrays[1], arrays[2], ancestors, arrays[3, :1])
        text = TextMask(length, self._slots(kv, self._graph.scratch_rows(tree.size)))
        kept, chosen, row, drafted = self._graph.step(tree, text, kv, decide, defer)
        return mx.concatenate([kept, chosen, row]), drafted, kv


def _choose_on_host(choose: Choose, num_real: int, kept: mx.array, logits: mx.array) -> mx.array:
    """Chosen tokens int32 [K] of nodes `kept`; padding nodes choose −1, which no child equals."""
    ids = np.array(kept)
    real = ids < num_real
    chosen = np.full(len(ids), -1, np.int32)
    chosen[real] = choose(ids[real], np.array(logits.astype(mx.float32))[real])
    return mx.array(chosen)


def _upload(tree: DraftTree, size: int) -> tuple[mx.array, mx.array]:
    """A tree as int32 [4, size] (tokens, parents, depths, node count) and bool [size, size] ancestors.

    Padding repeats the root's token: its rows are computed, and must be finite, but nobody sees them.
    """
    arrays = np.zeros((4, size), np.int32)
    arrays[0], arrays[1], arrays[3] = tree.tokens[0], -1, tree.num_nodes
    arrays[:3, : tree.num_nodes] = tree.tokens, tree.parents, tree.depths
    return mx.array(arrays), mx.array(tree.ancestor_mask(size))


def _check_kept(num_kept: int, num_nodes: int) -> None:
    if not 1 <= num_kept <= num_nodes:
        raise UserError(f"kept nodes {num_kept} must lie between 1 and the {num_nodes} nodes")


def _with_defaults(settings: RuntimeSettings, architecture: Architecture) -> RuntimeSettings:
    """Settings in which nothing that this model reads is left open."""
    defaults = {
        "num_kept": settings.num_nodes,
        "context": architecture.default_context,
        "prune_over": PRUNE_OVER[0],
        "dtype": DTYPES["mlx"][0],
        "stream_rows": STREAM_ROWS[0],
        "bucket": BUCKET,
        "compiled": mx.default_device() == mx.gpu,
    }
    return replace(settings, **{n: v for n, v in defaults.items() if getattr(settings, n) is None})


def _check_settings(config: SpeculativeConfig, settings: RuntimeSettings) -> None:
    for name, known in (
        ("prune_over", PRUNE_OVER),
        ("dtype", DTYPES["mlx"]),
        ("stream_rows", STREAM_ROWS),
    ):
        if (value := getattr(settings, name)) not in known:
            raise UserError(f"{name} '{value}' is not one of {', '.join(known)}")
    stream_rows = settings.stream_rows
    _check_kept(settings.num_kept, settings.num_nodes)
    if config.main_attends_streams and stream_rows != "kept":
        raise UserError(f"stream_rows '{stream_rows}' changes a main stream that attends to streams")
