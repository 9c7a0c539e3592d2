"""Tokens per call of a draft from an adapter's recorded rank statistics, without a prompt.

The statistics say how often the true tokens after a position had these ranks in its streams
(`ss_device.training.validation.rank_statistics`, `joint`). A tree that is a fixed set of rank paths
accepts, on average over positions, the sum of its paths' shares. A k-ary tree and a chain without parent
bias are such sets; for best-first the set of the most frequent paths stands in, which is the best fixed
tree: trees that follow each position's own probabilities can do better. Positions count alike, while
decoding meets those behind a rejection more often, and prompt lookup is not predicted.
"""

from __future__ import annotations

from collections import Counter
from itertools import product

from ss_device.draft_choice import DraftChoice
from ss_device.errors import UserError

TOP_K = 3  # of a k-ary tree, as `DraftChoice` draws it


def path_shares(statistics: dict, whose: str = "the adapter") -> dict[tuple[int, ...], float]:
    """Share of positions whose first true tokens have these ranks, by rank path; cut ranks are left out.

    statistics: as recorded; whose: for messages. Raises UserError where they are missing or damaged.
    """
    try:
        beyond = len(statistics["counts"][0]) - 1
        drafts = {tuple(map(int, ranks.split())): int(n) for ranks, n in statistics["joint"].items()}
        total = sum(drafts.values())
        if total < 1 or min(drafts.values()) < 0:
            raise ValueError("no positions")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{whose} has no recorded rank statistics of whole drafts: give prompts with --input"
        ) from error
    shares: Counter[tuple[int, ...]] = Counter()
    for ranks, times in drafts.items():
        for depth in range(1, len(ranks) + 1):
            if ranks[depth - 1] >= beyond:
                break
            shares[ranks[:depth]] += times / total
    return dict(shares)


def predicted_tokens_per_call(shares: dict[tuple[int, ...], float], choice: DraftChoice) -> float:
    """One token of the model's own and the expected accepted ones. Raises ValueError for prompt lookup."""
    if choice.lookup:
        raise ValueError("prompt lookup is not in the rank statistics")
    deepest = choice.max_streams or max(map(len, shares), default=0)
    drafted = choice.num_nodes - 1
    if choice.shape == "chain":
        paths = [(0,) * depth for depth in range(1, deepest + 1)]
    elif choice.shape == "k-ary":
        paths = [path for depth in range(1, deepest + 1) for path in product(range(TOP_K), repeat=depth)]
    else:  # a path is never more frequent than its beginning
        paths = sorted((p for p in shares if len(p) <= deepest), key=lambda p: (-shares[p], len(p), p))
    return 1.0 + sum(shares.get(path, 0.0) for path in paths[:drafted])
