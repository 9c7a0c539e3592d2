"""How the functions of a Core AI asset differ from those of a Core ML package, and what an asset needs."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from ss_convert.graph.interface import num_slots
from ss_convert.graph.options import COMPOSITE, GraphOptions
from ss_device.errors import UserError

MISSING = (
    "--target coreai needs coreai-core, which is not installed (pip install 'ss-device[coreai]'; "
    "there are wheels for Linux on x86-64, Python 3.11 to 3.14; for a Mac see docs/coreai.md)"
)
# From here on apple/coreai-models, issue 124, reports wrong output on iOS, of states of dynamic size.
LARGE_STATE = 2048


def check_installed() -> None:
    """UserError where Core AI's Python package is not to be had."""
    if find_spec("coreai") is None:
        raise UserError(MISSING)


def coreai_options(options: GraphOptions, cache: str | None) -> GraphOptions:
    """The options of an asset's functions. cache: what the user said; None: what suits the preset.

    With preset `ane` the cache is an input and attention runs head by head, which is how Apple's own
    exports for the Neural Engine have it (docs/coreai.md).
    """
    is_ane = options.preset == "ane"
    attention = COMPOSITE if options.attention == "fused" else options.attention
    if is_ane and attention == "explicit":
        attention = "by-head"
    cache = cache or ("inputs" if is_ane else "state")
    return replace(options, cache=cache, attention=attention, pad_state=False)


def why_no_main(options: GraphOptions) -> str | None:
    """Why an asset has no `main` for Apple's engines (`coreai/plain_function.py`); None: it has one."""
    if options.cuts:
        return f"it is in {len(options.cuts) + 1} parts, and their bundles have one asset"
    if options.preset == "ane":
        # A load that prefers the Neural Engine was reported to fail over what it cannot compile.
        return "its sizes vary, which the Neural Engine does not take"
    return None


def plain_notes(options: GraphOptions) -> list[str]:
    """What the user should know of the base in Apple's tools."""
    reason = why_no_main(options)
    return [f"Core AI: no function 'main' of the base for Apple's tools: {reason}"] if reason else []


def large_state_notes(options: GraphOptions) -> list[str]:
    """What the user should know of the asset."""
    slots = num_slots(options)
    if options.cache == "state" and slots >= LARGE_STATE:
        return [
            f"Core AI: a state of {slots} slots; wrong output was reported on iOS of states of "
            f"{LARGE_STATE} and more whose size is dynamic (this one is fixed); --coreai-cache inputs does "
            "without a state"
        ]
    return []
