"""The adapter's tensors as inputs of the function that is being built (`ss_device/adapter_inputs.py`)."""

from __future__ import annotations

from collections.abc import Mapping

from ss_convert.graph.interface import Shapes
from ss_convert.graph.operations import op
from ss_convert.graph.options import GraphOptions
from ss_convert.graph.weights import BaseWeights, ExportWeights
from ss_device.adapter import Adapter
from ss_device.adapter_inputs import SCALE, for_prefill, input_shapes, place_of
from ss_device.architecture import Architecture
from ss_device.config import SpeculativeConfig
from ss_device.lora_names import FACTORS, lora_name


def adapter_shapes(
    config: SpeculativeConfig, architecture: Architecture, options: GraphOptions
) -> tuple[Shapes, Shapes]:
    """Adapter inputs of the prefill and of the step function; none where adapters are constants."""
    if options.lora != "inputs":
        return {}, {}
    shapes = input_shapes(config, architecture, options.lora_rank, options.prunes)
    step: Shapes = {name: ("float16", shape) for name, shape in shapes.items()}
    return for_prefill(step), step


class InputWeights(ExportWeights):
    """Base weights as constants, everything of the adapter taken from the function's inputs."""

    def __init__(
        self, architecture: Architecture, weights: BaseWeights, adapter: Adapter, inputs: Mapping
    ) -> None:
        super().__init__(architecture, weights, adapter)
        self._inputs, self._taken = inputs, {}

    def part(self, name: str):
        """A tensor of the adapter as a value of the function."""
        if name not in self._taken:
            place, index = place_of(name)
            self._taken[name] = self._row(self._inputs[place], index)
        return self._taken[name]

    def lora(self, projection: str):
        """a [rank, in], b [out, rank] and the scale of a projection's LoRA: every projection has one."""
        a, b = (self.part(lora_name(projection, factor)) for factor in FACTORS)
        return a, b, self._inputs[SCALE]

    @staticmethod
    def _row(value, index: int | None):
        if index is None:
            return value
        size = [1, *value.shape[1:]]
        row = op.slice_by_size(value, begin=[index] + [0] * (len(size) - 1), size=size)
        return op.squeeze(row, axes=[0])
