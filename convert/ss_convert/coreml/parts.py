"""A decoder cut at layer boundaries into parts that run one after another, each a package of its own.

What a part is given and what it passes on is in `part_interface.py`, how cuts are chosen in `cutting.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ss_device.architecture import Architecture


@dataclass(frozen=True)
class Part:
    """Layers first..stop-1 of a decoder of `num_layers`. The first part embeds, the last one chooses."""

    first: int
    stop: int
    num_layers: int

    @property
    def layers(self) -> range:
        return range(self.first, self.stop)

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.stop == self.num_layers

    def windows(self, architecture: Architecture) -> tuple[int | None, ...]:
        """The different windows of its layers."""
        return tuple(dict.fromkeys(architecture.window(layer) for layer in self.layers))


def whole(architecture: Architecture) -> Part:
    """The decoder in one part."""
    return Part(0, architecture.num_layers, architecture.num_layers)


def parts_of(architecture: Architecture, cuts: Sequence[int] = ()) -> tuple[Part, ...]:
    """The parts between `cuts`, the first layers of all parts but the first one."""
    count = architecture.num_layers
    edges = [0, *cuts, count]
    return tuple(Part(a, b, count) for a, b in zip(edges, edges[1:], strict=False))


def split_layers(part: Part, first_msa_layer: int) -> tuple[range, range]:
    """The part's layers below the first MSA layer, and from it on."""
    middle = min(max(first_msa_layer, part.first), part.stop)
    return range(part.first, middle), range(middle, part.stop)


def part_names(name: str, count: int) -> tuple[str, ...]:
    """Package file names of `count` parts: `<name>.mlpackage`, or numbered from 1."""
    if count == 1:
        return (f"{name}.mlpackage",)
    width = len(str(count))
    return tuple(f"{name}-{index:0{width}d}-of-{count}.mlpackage" for index in range(1, count + 1))
