"""Which drafts an adapter runs with: those asked for, those tuned for this device, or the bundle's tree."""

from __future__ import annotations

from dataclasses import dataclass

from ss_device.bundle import Bundle, BundledAdapter
from ss_device.decoding import Drafter
from ss_device.draft_policy import AdaptiveDrafter
from ss_device.tree import BigramBias
from ss_runtime.plain_base import has_streams
from ss_runtime.settings import DraftSettings, default_dtype
from ss_runtime.tuning import drafts_need_tuning, read_tuning


@dataclass(frozen=True)
class ChosenDrafts:
    """A drafter; num_kept: nodes that pruning has to keep for it (None: as the bundle says).

    untuned: it was not chosen for this device, where drafts can be slower than none.
    """

    drafter: Drafter | AdaptiveDrafter
    num_kept: int | None = None
    untuned: bool = False


def choose_drafts(
    bundle: Bundle,
    adapter: BundledAdapter,
    drafts: DraftSettings,
    bias: BigramBias | None,
    dtype: str | None = None,
    backend: str = "mlx",
) -> ChosenDrafts:
    """Tunings are of MLX alone. UserError for a damaged tuning or more nodes than the bundle takes."""
    if drafts.said or backend != "mlx" or not has_streams(adapter):
        return ChosenDrafts(drafts.drafter(adapter, bias))
    tuned = read_tuning(bundle, adapter.app, dtype or default_dtype(backend))
    if tuned is None:
        return ChosenDrafts(drafts.drafter(adapter, bias), untuned=drafts_need_tuning())
    return ChosenDrafts(tuned.drafter(bias), tuned.num_kept or adapter.num_nodes)
