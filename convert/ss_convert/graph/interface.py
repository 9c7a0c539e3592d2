"""What goes into and comes out of the functions of a package: the one place that says so.

N nodes, K kept, γ streams, C context, T chunk, V vocabulary, L layers, h hidden size.

State (shared by all functions)
    kv_cache         fp16 [2·L, n_kv, C + max(N, T), head_dim]  keys of layers 0..L-1, then their values.
                     Slot s < C holds position s once committed. Slots C..C+N-1 are scratch: the rows of
                     the last step, node v in slot C+v; above the pruning layer kept row r in slot C+r.

`<app>_prefill`, T prompt tokens without streams
    tokens           int32 [1, T]     padded behind with any valid id
    position         int32 [1]        position (and slot) of the first token
    mask             fp16 [T, C+T]    0 where row t sees slot s (s < C) or token s - C, else -1e4
  → hidden           fp16 [1, h]      last row at the last layer's input; a function must return something

`<app>_step`, one decoding step (docs/method.md, One decoding step)
    tokens           int32 [1, N]     node 0 is the root, parents before children
    positions        int32 [N]        committed length + depth
    parents          int32 [N]        -1 for the root and for padding
    mask             fp16 [N, C+N]    0 where node v sees slot s (s < C) or node s - C, else -1e4; padding
                                      sees itself only, and at least that
    commit_position  int32 [1]        slot of the first row committed now
    commit_nodes     int32 [N]        node ids of the previous step's accepted path, then -1
    commit_rows      int32 [N]        only when K < N: their rows among the kept nodes, then -1
    stream_gate      fp16 [1]         only with main_attends_streams: 0, or -1e4 to hide streams from main
  → kept             int32 [K]        node ids, ascending, padding last
    chosen           int32 [K]        the model's next token at each kept node
    accepted         int32 [1]        node where the greedy walk ends
    stream_logits    fp16 [γ, V]      streams of the accepted node; with `sampling` fp16 [K, γ, V], those of
                                      every kept node, in the order of `kept`
    logits           fp16 [K, V]      only with `sampling`: main logits of the kept nodes, for a host that
                                      draws tokens; it then walks the tree, drafts from the streams of the
                                      node where its own walk ends and commits its own path; `chosen` and
                                      `accepted` are the greedy ones

With `--lora inputs` the functions are called
`adapter_prefill` and `adapter_step` and also take the adapter's tensors (`ss_device/adapter_inputs.py`).

Masks say nothing of sliding windows: the functions hide from layers with a window what lies further
back than it, by the positions they are given, slot s counting as position s.

A step first moves the previous step's accepted rows from scratch to slots commit_position,
commit_position+1, …; up to N slots from there are overwritten, so nothing visible may lie behind it.
The call after a prefill passes -1 everywhere and the prompt's length.

Where a decoder is cut into several packages, a part takes those of these inputs that it has a use for, and
from the part before it

    previous_hidden   fp16 [T, h] (prefill), [N, h] (step, up to the first MSA layer's input) or
                      [K·(1+γ), h] (step, above it: the kept nodes, then their streams node by node)
    previous_kept     int32 [K]  only when K < N, above the first MSA layer: `kept` of the part before

Where the cache is an input (`cache` = `inputs`, for Apple's Neural Engine in Core AI), there is no state:
both functions take `kv_cache` fp16 [2·L, n_kv, C, head_dim] and put out `rows` [2·L, n_kv, T or N,
head_dim], which the host writes to their slots; a step takes no `commit_*`.

All parts but the last one put out `hidden`, and `kept` where nodes were pruned; the last one what the
whole function does. Every part has a state of its own with its layers' slice of `kv_cache`, and its own
scratch rows and commit.
"""

from __future__ import annotations

import re

from ss_convert.graph.options import GraphOptions
from ss_convert.graph.parts import Part
from ss_device.architecture import Architecture
from ss_device.config import SpeculativeConfig

STATE = "kv_cache"
MASKED = -1e4
STATE_MULTIPLE = 32

Shapes = dict[str, tuple[str, tuple[int, ...]]]


def function_names(app: str) -> tuple[str, str]:
    """Names of an application's prefill and step functions; Core ML wants identifiers."""
    stem = re.sub(r"\W", "_", app, flags=re.ASCII)
    stem = f"app_{stem}" if not stem or stem[0].isdigit() else stem
    return f"{stem}_prefill", f"{stem}_step"


def functions_of(app: str, options: GraphOptions) -> tuple[str, str]:
    """Names of the functions that run an application: its own, or those that all adapters are inputs of."""
    return function_names("adapter" if options.lora == "inputs" else app)


def num_slots(options: GraphOptions) -> int:
    """Slots of the state: the context and scratch room for a step or an overhanging chunk."""
    return options.context + max(options.num_nodes, options.chunk)


def state_shape(architecture: Architecture, options: GraphOptions) -> tuple[int, int, int, int]:
    """(2·L, n_kv, C + max(N, T), head_dim), head_dim rounded up to a multiple of 32 with `pad_state`."""
    a = architecture
    width = -(-a.head_dim // STATE_MULTIPLE) * STATE_MULTIPLE if options.pad_state else a.head_dim
    return 2 * a.num_layers, a.num_kv_heads, num_slots(options), width


def prefill_inputs(options: GraphOptions) -> Shapes:
    """Name → (dtype, shape) of the prefill function's inputs."""
    chunk = options.chunk
    return {
        "tokens": ("int32", (1, chunk)),
        "position": ("int32", (1,)),
        "mask": ("float16", (chunk, options.context + chunk)),
    }


def step_inputs(config: SpeculativeConfig, options: GraphOptions) -> Shapes:
    """Name → (dtype, shape) of the step function's inputs."""
    n = options.num_nodes
    shapes: Shapes = {
        "tokens": ("int32", (1, n)),
        "positions": ("int32", (n,)),
        "parents": ("int32", (n,)),
        "mask": ("float16", (n, options.context + n)),
        "commit_position": ("int32", (1,)),
        "commit_nodes": ("int32", (n,)),
    }
    if options.prunes:
        shapes["commit_rows"] = ("int32", (n,))
    if config.main_attends_streams:
        shapes["stream_gate"] = ("float16", (1,))
    return shapes


# An input of a part and the output of the part before that it takes.
WIRES = {"previous_hidden": "hidden", "previous_kept": "kept"}


def part_state_shape(architecture: Architecture, options: GraphOptions, part: Part) -> tuple[int, ...]:
    """(2·layers, n_kv, slots, head_dim) of the part's state."""
    return 2 * len(part.layers), *state_shape(architecture, options)[1:]


def given_cache(architecture: Architecture, options: GraphOptions, part: Part) -> Shapes:
    """The part's keys and values as an input, where they are no state: committed slots alone."""
    if options.cache == "state":
        return {}
    a = architecture
    shape = (2 * len(part.layers), a.num_kv_heads, options.context, a.head_dim)
    return {STATE: ("float16", shape)}


def part_prefill_inputs(architecture: Architecture, options: GraphOptions, part: Part) -> Shapes:
    """Name → (dtype, shape) of the inputs of a part's prefill function."""
    shapes = prefill_inputs(options) | given_cache(architecture, options, part)
    if part.is_first:
        return shapes
    del shapes["tokens"]
    if part.first == part.num_layers - 1:
        del shapes["mask"]  # the last layer stops at its keys and values
    return shapes | {"previous_hidden": ("float16", (options.chunk, architecture.hidden_size))}


def part_step_inputs(
    config: SpeculativeConfig, architecture: Architecture, options: GraphOptions, part: Part
) -> Shapes:
    """Name → (dtype, shape) of the inputs of a part's step function; the whole decoder takes them all."""
    known = step_inputs(config, options)
    if options.cache == "inputs":  # the host commits
        known = {name: shape for name, shape in known.items() if not name.startswith("commit_")}
    known |= given_cache(architecture, options, part)
    if part.is_first and part.is_last:
        return known
    first_msa_layer = part.num_layers - config.num_msa_layers
    has_lower, has_upper = part.first < first_msa_layer, part.stop > first_msa_layer
    starts_streams = part.first <= first_msa_layer < part.stop
    prunes_here = options.prunes and starts_streams
    windowed = any(window is not None for window in part.windows(architecture))
    learned = not architecture.rotated and (part.is_first or starts_streams)
    used = {
        "tokens": part.is_first or prunes_here or part.is_last,
        "positions": architecture.rotated or windowed or learned,
        "parents": prunes_here or part.is_last,
        "commit_nodes": has_lower or not options.prunes,
        "commit_rows": has_upper,
        "stream_gate": has_upper,
    }
    shapes = {n: shape for n, shape in known.items() if used.get(n, True)}
    if not part.is_first:
        above = part.first > first_msa_layer
        rows = options.num_kept * (1 + config.num_streams) if above else options.num_nodes
        shapes["previous_hidden"] = ("float16", (rows, architecture.hidden_size))
        if above and options.prunes:
            shapes["previous_kept"] = ("int32", (options.num_kept,))
    return shapes


def sources(shapes: Shapes) -> dict[str, str]:
    """Input → where it comes from: an input of the whole function, or an output of the part before."""
    return {name: WIRES.get(name, name) for name in shapes}
