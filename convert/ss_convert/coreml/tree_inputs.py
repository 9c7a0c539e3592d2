"""What a step knows of its draft tree, as matrices: parents, ancestors, which nodes are real."""

from __future__ import annotations

from dataclasses import dataclass

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
    """The nodes described by the step function's inputs."""
    mask_prefix, mask_nodes = split(inputs["mask"], [context, num_nodes], axis=1)
    return Nodes(
        parents=one_hot(inputs["parents"], num_nodes),
        ancestors=as_number(mb.greater(x=mask_nodes, y=np.float16(MASKED / 2))),
        ids=np.arange(num_nodes, dtype=np.float16),
        mask_prefix=mask_prefix,
        mask_nodes=mask_nodes,
    )


def keep_nodes(nodes: Nodes, selection) -> Nodes:
    """The nodes that a one-hot selection [K, N] names, in its order."""

    def among_kept(matrix):
        return mb.matmul(x=select(selection, matrix), y=selection, transpose_y=True)

    return Nodes(
        parents=among_kept(nodes.parents),
        ancestors=among_kept(nodes.ancestors),
        ids=row_sums(mb.mul(x=selection, y=nodes.ids[None])),
        mask_prefix=select(selection, nodes.mask_prefix),
        mask_nodes=among_kept(nodes.mask_nodes),
    )
