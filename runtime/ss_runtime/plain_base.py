"""The base alone as a model of the runtime: no adapter and no streams. Prompt lookup may still draft."""

from __future__ import annotations

from ss_device.bundle import BundledAdapter, Manifest
from ss_device.config import SpeculativeConfig

MAX_TOKENS, NUM_NODES = 256, 32
# The least that a step model takes; with `stream_rows` "none" nothing of it is ever computed.
CONFIG = SpeculativeConfig(
    num_streams=1,
    num_msa_layers=1,
    stream_mlp="base",
    stream_adapter_rank=0,
    pruning_rank=0,
    value_rotation=1.0,
)


def base_name(manifest: Manifest) -> str:
    """The base's name among the models of a bundle."""
    name = manifest.base.name
    return f"{name}-base" if name in manifest.adapters else name


def plain_base(manifest: Manifest) -> BundledAdapter:
    """The base in the place of an adapter: prompts as they are, no tensor file of its own."""
    return BundledAdapter(base_name(manifest), CONFIG, "{prompt}", (), MAX_TOKENS, NUM_NODES, "")


def has_streams(adapter: BundledAdapter) -> bool:
    """False for the base alone."""
    return bool(adapter.tensor_file)
