"""What every step model refuses before it indexes an array: prompts, trees and paths that do not fit it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ss_device.errors import UserError
from ss_device.step_model import StepLimits
from ss_device.token_ids import check_token_ids
from ss_device.tree import DraftTree


def check_prompt(limits: StepLimits, tokens: Sequence[int]) -> None:
    """Raise UserError for an empty prompt, one longer than the context, or an id outside the vocabulary."""
    if len(tokens) < 1:
        raise UserError("the prompt is empty: at least one token is needed")
    if len(tokens) > limits.context:
        raise UserError(f"the prompt has {len(tokens)} tokens, the context holds {limits.context}")
    if limits.vocab_size is not None:
        check_token_ids(tokens, limits.vocab_size, "the prompt")


def check_tree(limits: StepLimits, tree: DraftTree, length: int) -> None:
    """Raise UserError for a tree that a step behind `length` committed tokens cannot take.

    That is: more nodes than N, a branch that reaches past the context, an id outside the vocabulary.
    """
    if tree.num_nodes > limits.num_nodes:
        raise UserError(f"a tree of {tree.num_nodes} nodes, this model takes at most {limits.num_nodes}")
    if length + int(tree.depths.max()) + 1 > limits.context:
        raise UserError(
            f"the tree reaches past the context of {limits.context} tokens: {length} are committed and "
            f"it is {int(tree.depths.max()) + 1} deep"
        )
    if limits.vocab_size is not None:
        check_token_ids(tree.tokens, limits.vocab_size, "the draft tree")


def kept_rows(kept: np.ndarray, path: Sequence[int]) -> np.ndarray:
    """Rows of the nodes `path` among the kept ones, int32 [path]. kept: int [K], ascending.

    Raises ValueError for an empty path and for nodes that were not kept: they have no keys and values.
    """
    nodes = np.asarray(path, np.int32)
    rows = np.searchsorted(kept, nodes).astype(np.int32)
    if not nodes.size or not np.array_equal(kept[np.minimum(rows, len(kept) - 1)], nodes):
        raise ValueError(f"path {list(path)} is empty or holds nodes that were not kept")
    return rows
