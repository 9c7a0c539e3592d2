"""What goes into and comes out of a part's functions, where a decoder is cut into several packages.

A part takes those of the whole function's inputs (`interface.py`) that it has a use for, and from the
part before it

    previous_hidden   fp16 [T, h] (prefill), [N, h] (step, up to the first MSA layer's input) or
                      [K·(1+γ), h] (step, above it: the kept nodes, then their streams node by node)
    previous_kept     int32 [K]  only when K < N, above the first MSA layer: `kept` of the part before

All parts but the last one put out `hidden`, and `kept` where nodes were pruned; the last one what the
whole function does. Every part has a state of its own with its layers' slice of `kv_cache`, and its own
scratch rows and commit.
"""

from __future__ import annotations

from ss_convert.coreml.interface import Shapes, prefill_inputs, state_shape, step_inputs
from ss_convert.coreml.options import CoreMLOptions
from ss_convert.coreml.parts import Part
from ss_device.architecture import Architecture
from ss_device.config import SpeculativeConfig

# An input of a part and the output of the part before that it takes.
WIRES = {"previous_hidden": "hidden", "previous_kept": "kept"}


def part_state_shape(architecture: Architecture, options: CoreMLOptions, part: Part) -> tuple[int, ...]:
    """(2·layers, n_kv, slots, head_dim) of the part's state."""
    return 2 * len(part.layers), *state_shape(architecture, options)[1:]


def part_prefill_inputs(architecture: Architecture, options: CoreMLOptions, part: Part) -> Shapes:
    """Name → (dtype, shape) of the inputs of a part's prefill function."""
    shapes = prefill_inputs(options)
    if part.is_first:
        return shapes
    del shapes["tokens"]
    if part.first == part.num_layers - 1:
        del shapes["mask"]  # the last layer stops at its keys and values
    return shapes | {"previous_hidden": ("float16", (options.chunk, architecture.hidden_size))}


def part_step_inputs(
    config: SpeculativeConfig, architecture: Architecture, options: CoreMLOptions, part: Part
) -> Shapes:
    """Name → (dtype, shape) of the inputs of a part's step function; the whole decoder takes them all."""
    if part.is_first and part.is_last:
        return step_inputs(config, options)
    first_msa = part.num_layers - config.num_msa_layers
    has_lower, has_upper = part.first < first_msa, part.stop > first_msa
    starts_streams = part.first <= first_msa < part.stop
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
    shapes = {n: shape for n, shape in step_inputs(config, options).items() if used.get(n, True)}
    if not part.is_first:
        above = part.first > first_msa
        rows = options.num_kept * (1 + config.num_streams) if above else options.num_nodes
        shapes["previous_hidden"] = ("float16", (rows, architecture.hidden_size))
        if above and options.prunes:
            shapes["previous_kept"] = ("int32", (options.num_kept,))
    return shapes


def sources(shapes: Shapes) -> dict[str, str]:
    """Input → where it comes from: an input of the whole function, or an output of the part before."""
    return {name: WIRES.get(name, name) for name in shapes}
