"""A decoder cut at layer boundaries into parts that run one after another, each a package of its own.

What a part is given and what it passes on is in `interface.py`. Cuts make files as even as layer boundaries
allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ss_convert.graph.options import GraphOptions
from ss_convert.graph.weight_format import TABLES, stored_bytes, weight_format_of
from ss_device.adapter import Adapter
from ss_device.architecture import Architecture
from ss_device.errors import UserError


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


def part_names(name: str, count: int, suffix: str = ".mlpackage") -> tuple[str, ...]:
    """File names of the packages or assets of `count` parts: `<name><suffix>`, or numbered from 1."""
    if count == 1:
        return (f"{name}{suffix}",)
    width = len(str(count))
    return tuple(f"{name}-{index:0{width}d}-of-{count}{suffix}" for index in range(1, count + 1))


# Files above about 1 GB leave the Neural Engine (docs/platform.md, Large files). Tables come on top.
LARGEST_FILE = 950_000_000


def choose_cuts(
    architecture: Architecture,
    adapters: Sequence[Adapter],
    options: GraphOptions,
    parts: int | str,
) -> tuple[int, ...]:
    """Cuts of `parts` parts whose largest file is smallest; `auto`: as few parts as stay under 1 GB.

    adapters, options: whose functions the packages hold, and how they are built. Raises UserError for
    more parts than layers, or where a single layer is too large for a file.
    """
    layers = architecture.num_layers
    if parts != "auto" and parts > layers:
        raise UserError(f"--parts {parts} exceeds the {layers} layers of the base")
    sizes = _Sizes(architecture, adapters, options)
    for count in range(1, layers + 1) if parts == "auto" else (parts,):
        largest, cuts = _even_cuts(sizes, layers, count)
        if parts != "auto" or largest <= LARGEST_FILE:
            return cuts
    raise UserError(
        f"--parts auto: even one layer per part leaves a file of {largest / 1e9:.2f} GB, the most is "
        f"{LARGEST_FILE / 1e9:.2f} GB; store the weights in fewer bits"
    )


def _even_cuts(sizes: _Sizes, layers: int, count: int) -> tuple[int, tuple[int, ...]]:
    """(bytes of the largest part, cuts): the best `count` parts, by dynamic programming."""
    best = {0: (0, ())}
    for _ in range(count):
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (largest, cuts) in best.items():
            for stop in range(start + 1, layers + 1):
                entry = (max(largest, sizes.of(Part(start, stop, layers))), (*cuts, start))
                if stop not in found or entry < found[stop]:
                    found[stop] = entry
        best = found
    largest, starts = best[layers]
    return largest, starts[1:]


class _Sizes:
    """Weight bytes of parts, from shapes alone: base weights as stored, adapters' own in fp16."""

    def __init__(
        self,
        architecture: Architecture,
        adapters: Sequence[Adapter],
        options: GraphOptions,
    ) -> None:
        formats = (options.weights, options.embedding_weights)
        shapes = architecture.weight_shapes()
        base = {n: stored_bytes(shape, weight_format_of(n, shape, formats)) for n, shape in shapes.items()}
        self._layers = [_of_layer(base, i) for i in range(architecture.num_layers)]
        for adapter in adapters:
            self._add(adapter)
        self._embedding = base["embed.weight"] + base.get("positions.weight", 0)
        self._head = base[TABLES[0] if architecture.tied_head else TABLES[1]]
        self._tied = architecture.tied_head
        self._pruned_at = {
            architecture.num_layers - adapter.config.num_msa_layers
            for adapter in adapters
            if options.prunes
        }

    def _add(self, adapter: Adapter) -> None:
        first = len(self._layers) - adapter.config.num_msa_layers
        for name, pair in adapter.lora.items():
            self._layers[int(name.split(".")[1])] += sum(2 * factor.size for factor in pair)
        for name, tensor in adapter.tensors.items():
            if name.startswith(("stream_adapters.", "stream_lora.")):
                self._layers[first + int(name.split(".")[1])] += 2 * tensor.size

    def of(self, part: Part) -> int:
        """Bytes of a part; early-exit pruning needs the head where the first MSA layer is."""
        heads = part.is_last or any(layer in part.layers for layer in self._pruned_at)
        tables = self._embedding if part.is_first else 0
        if heads and not (part.is_first and self._tied):
            tables += self._head
        return tables + sum(self._layers[layer] for layer in part.layers)


def _of_layer(sizes: Mapping[str, int], layer: int) -> int:
    return sum(size for name, size in sizes.items() if name.startswith(f"layers.{layer}."))
