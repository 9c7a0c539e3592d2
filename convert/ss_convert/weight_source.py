"""The base's weights, opened only if some stage needs them and read tensor by tensor."""

from __future__ import annotations

import gc

from ss_device.base_model import BaseFolder
from ss_device.checkpoint_weights import CheckpointWeights


class WeightSource:
    """Canonical base weights on demand, and as a Core ML package stores them."""

    def __init__(self, base: BaseFolder) -> None:
        self._base = base
        self._weights: CheckpointWeights | None = None
        self._stored = None

    def get(self) -> CheckpointWeights:
        """Canonical name → array, read when asked for (`BaseFolder.stored_weights`)."""
        if self._weights is None:
            self._weights = self._base.stored_weights()
        return self._weights

    def stored(self, options):
        """`BaseWeights` as `GraphOptions` want them, compressed once for all adapters."""
        from ss_convert.graph.functions import base_weights

        if self._stored is None:
            self._stored = base_weights(self._base.architecture, self.get(), options)
        return self._stored

    def release(self) -> None:
        """Let go of what `stored` made, and of programs that were built from it and refer to themselves."""
        self._stored = None
        gc.collect()
