"""Where the CPU time of one decoding step goes: `python -m scripts.profile_step BUNDLE`.

Per tree size: processor time of drawing the tree on the host, of the walk, of the step without streams,
of the streams' own pass, and of Python's part of the step (building the graph); then pieces of the
step's main pass, each evaluated by itself.
Times are the least of many repetitions of this process's own CPU time. They compare parts with each other
and are no benchmark (that is `ss-bench`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ss_device.acceptance import walk
from ss_device.bundle import open_bundle
from ss_device.decoding import Drafter
from ss_device.prompt_lookup import PromptLookup
from ss_device.tree import DraftTree, root_only
from ss_runtime.backends import load_openblas, open_backend
from ss_runtime.settings import RuntimeSettings

SIZES = (1, 8, 16, 32)


def least(action: Callable[[], object], repeats: int) -> float:
    """Least CPU milliseconds of `action` in this process (all of its threads)."""
    found = []
    for _ in range(repeats + 2):
        start = time.process_time()
        action()
        found.append(time.process_time() - start)
    return 1000 * min(found)


def step_parts(model, drafter: Drafter, prompt: list[int], repeats: int) -> dict[str, float]:
    """Milliseconds by part for one drafter behind `prompt`."""
    proposal = model.prefill(prompt)
    history = drafter.start(prompt)

    def grow() -> DraftTree:
        return drafter.grow(proposal, frozenset(), 64, history)

    tree = grow() if drafter.num_nodes > 1 else root_only(proposal.root)
    verified = model.step(tree)
    outcome = {"nodes": tree.num_nodes, "draw the tree": least(grow, repeats)}
    outcome["walk"] = least(lambda: walk(tree, verified.kept, verified.chosen), repeats)
    defers = model.limits.defers_streams
    outcome["step"] = least(lambda: model.step(tree, defer=defers), repeats)
    outcome["streams"] = _streams_alone(model, tree, repeats) if defers else 0.0
    outcome["build the graph"] = _graph_only(model, tree, repeats)
    return outcome


def _streams_alone(model, tree: DraftTree, repeats: int) -> float:
    """The second pass, for the accepted node's streams."""
    model.step(tree, defer=True)
    model.commit([0])
    return least(model.streams, repeats)


def _graph_only(model, tree: DraftTree, repeats: int) -> float:
    """The step without its evaluation: uploads and Python's part of the graph."""
    import mlx.core as mx

    from ss_runtime.mlx.step_model import _upload

    size = model._padded_size(tree.num_nodes)

    def build() -> None:
        arrays, ancestors = _upload(tree, size)
        length, defers = mx.array([model.cache.length]), model.limits.defers_streams
        model._step_graph(arrays, ancestors, length, model.cache.layers, defer=defers)

    return least(build, repeats)


def pass_parts(model, size: int, repeats: int) -> dict[str, float]:
    """Milliseconds of the graph's pieces, each evaluated by itself on `size` rows."""
    import mlx.core as mx

    from ss_runtime.mlx.layers import attend

    decoder, kv = model.decoder, model.cache.layers[0]
    slots = model._slots(model.cache.layers, size)
    h = decoder.architecture.hidden_size
    x = mx.array(np.random.default_rng(0).normal(size=(size, h)).astype(np.float32))
    layer = decoder.layers[0]
    mx.eval(x, kv)

    def matrices() -> None:
        a = layer.attn
        normed = layer.attn_norm(x)
        parts = [a[name](normed) for name in "qkv"]
        mx.eval(parts, a["o"](parts[0]), layer.mlp.block(normed, size))

    def attention() -> None:
        a = decoder.architecture
        q = mx.zeros((1, a.num_heads, size, a.head_dim))
        mask = mx.broadcast_to(mx.arange(slots) < model.cache.length + size, (size, slots))
        mx.eval(attend(q, *(part[:, :, :slots] for part in kv), mask, 1.0, None))

    layers = decoder.architecture.num_layers
    return {
        "matrices of all layers": layers * least(matrices, repeats),
        "attention of all layers": layers * least(attention, repeats),
        "LM head": least(lambda: mx.eval(decoder.logits(x)), repeats),
    }


def table(rows: list[dict]) -> str:
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for row in rows:
        lines.append(
            "| " + " | ".join(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()) + " |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--adapter")
    parser.add_argument("--prompt-tokens", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--lookup", action="store_true")
    arguments = parser.parse_args()
    bundle = open_bundle(arguments.bundle)
    adapter = bundle.adapter(arguments.adapter)
    load_openblas()
    bias = bundle.bigram_bias(adapter)
    generator = np.random.default_rng(0)
    vocab = bundle.manifest.architecture.vocab_size
    prompt = generator.integers(10, vocab, arguments.prompt_tokens).tolist()
    whole, parts = [], []
    for size in SIZES:
        settings = RuntimeSettings(backend="mlx", dtype="float32")
        model = open_backend(bundle, adapter, settings if size > 1 else settings.without_streams(adapter))
        lookup = PromptLookup() if arguments.lookup else None
        drafter = Drafter(size, bigram_bias=bias, lookup=lookup)
        whole.append(step_parts(model, drafter, prompt, arguments.repeats))
        parts.append({"rows": size} | pass_parts(model, size, arguments.repeats))
    print(table(whole), table(parts), sep="\n\n")


if __name__ == "__main__":
    main()
