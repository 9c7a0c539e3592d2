"""What bundles, packages and assets say of an adapter's functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ss_convert.graph.interface import functions_of, part_prefill_inputs, part_step_inputs, sources
from ss_convert.graph.options import GraphOptions
from ss_convert.graph.parts import Part, parts_of
from ss_device.adapter import Adapter
from ss_device.architecture import Architecture
from ss_device.base_model import BaseIdentity
from ss_device.bundle import PartLink, StepFunctions
from ss_device.config import SpeculativeConfig


def describe(
    adapter: Adapter, architecture: Architecture, options: GraphOptions, packages: Sequence[str]
) -> StepFunctions:
    """What the manifest says of an adapter's functions; the names are identifiers.

    packages: paths of packages or assets inside the bundle, one per part.
    """
    prefill, step = functions_of(adapter.app, options)
    parts = parts_of(architecture, options.cuts)
    several = len(parts) > 1
    return StepFunctions(
        package=packages[0],
        parts=tuple(packages) if several else (),
        chain=tuple(_link(adapter.config, architecture, options, p) for p in parts) if several else (),
        prefill=prefill,
        step=step,
        chunk=options.chunk,
        num_nodes=options.num_nodes,
        num_kept=options.num_kept,
        context=options.context,
        prune_over=options.prune_over,
        weights=options.weights,
        embedding_weights=options.embedding_weights,
        sampling=options.sampling,
        graph=options.graph() | ({} if options.cache == "state" else {"cache": options.cache}),
        lora=options.lora,
        lora_rank=options.lora_rank,
    )


def _link(
    config: SpeculativeConfig, architecture: Architecture, options: GraphOptions, part: Part
) -> PartLink:
    """What the manifest says of a part: what its engine takes, which commits where the host does."""
    options = replace(options, cache="state")
    return PartLink(
        layers=(part.first, part.stop),
        prefill=sources(part_prefill_inputs(architecture, options, part)),
        step=sources(part_step_inputs(config, architecture, options, part)),
    )


def package_metadata(
    base: BaseIdentity, adapters: Mapping[str, tuple[SpeculativeConfig, StepFunctions]], part: int = 0
) -> dict[str, str]:
    """What a package or asset says of itself, as strings: what adapters share, and each one as JSON.

    part: which of the packages in the order in which they run.
    """
    entries = {
        app: {
            "prefill": functions.prefill,
            "step": functions.step,
            "mode": config.mode,
            "num_streams": config.num_streams,
            "num_nodes": functions.num_nodes,
            "num_kept": functions.num_kept,
            "prune_over": functions.prune_over,
            "sampling": functions.sampling,
        }
        for app, (config, functions) in adapters.items()
    }
    shared = next(iter(adapters.values()))[1]
    place = {}
    if shared.chain:
        first, stop = shared.chain[part].layers
        place = {"part": f"{part + 1} of {len(shared.chain)}", "layers": f"{first}-{stop - 1}"}
    return {
        **place,
        "apps": " ".join(adapters),
        "base": base.name,
        "base_sha256": base.sha256,
        "context": str(shared.context),
        "chunk": str(shared.chunk),
        "weights": shared.weights,
        "embedding_weights": shared.embedding_weights,
        "lora": shared.lora,
        **({"lora_rank": str(shared.lora_rank)} if shared.lora == "inputs" else {}),
        **{name: str(value) for name, value in shared.graph.items()},
        **{f"adapter.{app}": json.dumps(entry) for app, entry in entries.items()},
    }
