"""What a step knows of its draft tree, as matrices: parents, ancestors, which nodes are real."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from coremltools.converters.mil import Builder as mb

from ss_convert.coreml.interface import MASKED
from ss_convert.coreml.layers import split
from ss_convert.coreml.selection import as_number, one_hot, row_sums, select


@dataclass(frozen=True)
class Nodes:
    """Nodes of a tree, all of them (n = N) or the kept ones (n = K). fp16.

    parents [n, n] one-hot (zero rows: root and padding); ancestors [n, n] 0/1, self included; ids [n]
    node ids; mask_prefix [n, C] and mask_nodes [n, n] additive.
    """

    parents: object
    ancestors: object
    ids: object
    mask_prefix: object
    mask_nodes: object

    @property
    def count(self) -> int:
        return self.parents.shape[0]


def read_nodes(inputs: dict, num_nodes: int, context: int) -> Nodes:
    """The nodes described by the step function's inputs; a part may have no use for `parents`."""
    parents = inputs.get("parents")
    mask_prefix, mask_nodes = split(inputs["mask"], [context, num_nodes], axis=1)
    return Nodes(
        parents=None if parents is None else one_hot(parents, num_nodes),
        ancestors=as_number(mb.greater(x=mask_nodes, y=np.float16(MASKED / 2))),
        ids=np.arange(num_nodes, dtype=np.float16),
        mask_prefix=mask_prefix,
        mask_nodes=mask_nodes,
    )


def within_window(nodes: Nodes, positions, window: int | None) -> Nodes:
    """The nodes with the masks of layers that see `window` positions, their own included (None: all).

    positions int32 [n]. Slot s of the prefix holds position s.
    """
    if window is None:
        return nodes
    slots = np.arange(nodes.mask_prefix.shape[1], dtype=np.int32)
    return replace(
        nodes,
        mask_prefix=mb.add(x=nodes.mask_prefix, y=outside_window(positions, slots[None], window)),
        mask_nodes=mb.add(
            x=nodes.mask_nodes,
            y=outside_window(positions, mb.expand_dims(x=positions, axes=[0]), window),
        ),
    )


def outside_window(positions, keys, window: int):
    """Additive mask [n, m] of keys at positions [1, m] that lie `window` or more behind positions [n].

    Compared as integers: fp16 holds positions exactly only up to 2048.
    """
    behind = mb.sub(x=mb.expand_dims(x=positions, axes=[1]), y=keys)
    far = mb.greater_equal(x=behind, y=np.int32(window))
    return mb.mul(x=as_number(far), y=np.float16(MASKED))


def keep_nodes(nodes: Nodes, selection) -> Nodes:
    """The nodes that a one-hot selection [K, N] names, in its order."""

    def among_kept(matrix):
        return mb.matmul(x=select(selection, matrix), y=selection, transpose_y=True)

    return Nodes(
        parents=None if nodes.parents is None else among_kept(nodes.parents),
        ancestors=among_kept(nodes.ancestors),
        ids=row_sums(mb.mul(x=selection, y=nodes.ids[None])),
        mask_prefix=select(selection, nodes.mask_prefix),
        mask_nodes=among_kept(nodes.mask_nodes),
    )
