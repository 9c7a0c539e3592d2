"""MLX memory by method: all live in one process, whose own peak counts the weights of all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager


class MemoryLedger:
    """Bytes of live MLX arrays that each method holds, and the most that it held in a counted run.

    methods: those that compute with MLX; others are in neither table. held: from what opening and running
    one left behind (weights, key and value buffers). peaks: that and what a run took on top.
    """

    def __init__(self, methods: Collection[str] = ()) -> None:
        self._methods = methods
        self.held: dict[str, int] = {}
        self.peaks: dict[str, int] = {}

    @contextmanager
    def account(self, name: str, counted: bool = True) -> Iterator[None]:
        """Charge to `name` what the block allocates and frees; counted: its peak as well."""
        if name not in self._methods:
            yield
            return
        import mlx.core as mx

        before, held = mx.get_active_memory(), self.held.get(name, 0)
        mx.reset_peak_memory()
        yield
        on_top = max(mx.get_peak_memory() - before, 0)
        if counted:
            self.peaks[name] = max(self.peaks.get(name, 0), held + on_top)
        self.held[name] = held + mx.get_active_memory() - before
