"""Resident memory over time, and whether it stays flat."""

from __future__ import annotations

import resource
from pathlib import Path
from statistics import median

FEW = 12  # samples that say nothing
ALLOWED_SHARE, ALLOWED_BYTES = 0.15, 100 << 20


def resident_bytes(process: int | str = "self") -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


class MemoryTrace:
    """Samples of resident memory, one per case."""

    def __init__(self) -> None:
        self.samples: list[int] = []

    def sample(self, process: int | str = "self") -> None:
        self.samples.append(resident_bytes(process))

    def growth(self) -> int | None:
        """Median of the last quarter less that of the second: the first one warms up. None for too few."""
        quarter = len(self.samples) // 4
        if len(self.samples) < FEW:
            return None
        return int(median(self.samples[-quarter:]) - median(self.samples[quarter : 2 * quarter]))

    def is_flat(self) -> bool:
        """Whether the growth is small, in bytes or as a share."""
        growth = self.growth()
        return growth is None or growth <= max(ALLOWED_BYTES, ALLOWED_SHARE * median(self.samples))

    def line(self) -> str:
        if not self.samples:
            return "no sample"
        first, last = self.samples[0] / 1e6, self.samples[-1] / 1e6
        growth = self.growth()
        told = (
            "too few samples to tell"
            if growth is None
            else f"{growth / 1e6:+.0f} MB from second to last quarter"
        )
        return f"{first:.0f} → {last:.0f} MB, {told}"
