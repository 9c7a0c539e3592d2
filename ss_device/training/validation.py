"""How well streams draft held-out text: ranks of the true tokens and tokens per call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from ss_device.reference.stream_model import StreamModel
from ss_device.training.batching import plan_batches
from ss_device.training.corpus import Document
from ss_device.training.losses import IGNORE, Batch, Outputs, forward, make_batch
from ss_device.training.segments import Caches, Segment, segment_outputs, split, stream_spans

TREE_WIDTH = 3
"""Children per level of the papers' full tree."""


@torch.no_grad()
def batch_ranks(model: StreamModel, batch: Batch) -> torch.Tensor:
    """Ranks [B, P, 1 + γ] of the true tokens, 0 = put first, -1 = no target there.

    Column 0: the early exit's rank of x[i+1] (-1 without a pruning head); column j: stream j's rank of
    x[i+1+j], with the bias of the true parent.
    """
    return _ranks(forward(model, batch, main=False, early=bool(model.config.pruning_rank)), batch)


@torch.no_grad()
def segment_ranks(
    model: StreamModel, segment: Segment, caches: Caches
) -> tuple[torch.Tensor | None, Caches]:
    """`batch_ranks` of one segment (None where no streams are) and the keys and values so far."""
    early = bool(model.config.pruning_rank)
    out, caches = segment_outputs(model, segment, caches, main=False, early=early)
    return (_ranks(out, segment.batch) if segment.carries else None), caches


def _ranks(out: Outputs, batch: Batch) -> torch.Tensor:
    streams = _rank_of(out.streams, batch.targets)
    if out.early is None:
        return torch.cat([torch.full_like(streams[..., :1], -1), streams], -1)
    return torch.cat([_rank_of(out.early, batch.main_targets)[..., None], streams], -1)


def _rank_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    above = (logits > logits.gather(-1, targets.clamp(min=0)[..., None])).sum(-1)
    return torch.where(targets == IGNORE, -1, above)


@torch.no_grad()
def document_ranks(
    objective: nn.Module,
    documents: Sequence[Document],
    num_streams: int,
    device: torch.device,
    tokens_per_batch: int = 2048,
    segment: int = 0,
) -> list[np.ndarray]:
    """Per document the ranks [completion length, 1 + γ]; `objective` is a (wrapped) StreamLoss."""
    plan = plan_batches([len(d.ids) for d in documents], tokens_per_batch, np.random.default_rng(0))
    found: dict[int, np.ndarray] = {}
    for indices in plan:
        chosen = [documents[i] for i in indices]
        batch = make_batch(chosen, num_streams).to(device)
        if segment:
            pieces = list(_segment_pieces(objective, batch, segment, stream_spans(chosen, segment)))
        else:
            pieces = [(objective(batch, ranks=True), batch.main_targets)]
        for row, index in enumerate(indices):
            kept = [ranks[row][targets[row] != IGNORE].cpu().numpy() for ranks, targets in pieces]
            found[index] = np.concatenate(kept)
    return [found[i] for i in range(len(documents))]


def _segment_pieces(objective, batch, size, spans):
    caches: Caches = []
    for segment in split(batch, size, spans):
        ranks, caches = objective(segment, caches, ranks=True)
        if ranks is not None:
            yield ranks, segment.batch.main_targets


def rank_statistics(ranks: Sequence[np.ndarray], depth: int = 10) -> dict:
    """Which rank was right at each depth, teacher-forced: counts [γ, depth + 1], the last = beyond.

    Used to choose trees: `top1` is the share of targets each stream puts first. `joint` counts whole
    drafts: "rank at depth 1, …, rank at depth γ" → positions, most frequent first, ranks cut at `depth`,
    over the positions where every stream has a target. What a tree given as a set of rank paths would
    accept there follows from them.
    """
    if not ranks:
        return {}
    rows = np.concatenate(ranks)[:, 1:]
    counts = [np.bincount(np.minimum(s[s >= 0], depth), minlength=depth + 1) for s in rows.T]
    whole = np.minimum(rows[(rows >= 0).all(1)], depth)
    joint, times = np.unique(whole, axis=0, return_counts=True)
    order = np.argsort(-times, kind="stable")
    return {
        "counts": [c.tolist() for c in counts],
        "top1": [round(float(c[0] / max(1, c.sum())), 4) for c in counts],
        "joint": {" ".join(map(str, joint[i])): int(times[i]) for i in order},
    }


def summary(ranks: Sequence[np.ndarray]) -> dict:
    """What the log says of held-out text, teacher-forced.

    top1 per depth; tokens_per_call: of decoding exactly this text with a chain, and with a tree of
    each stream's three best (`_top3`); early_top1: share of next tokens that the early exit puts first.
    """
    every = np.concatenate(ranks)
    line = {
        "top1": rank_statistics(ranks)["top1"],
        "tokens_per_call": round(tokens_per_call(ranks, 1), 4),
        "tokens_per_call_top3": round(tokens_per_call(ranks, TREE_WIDTH), 4),
    }
    if (every[:, 0] >= 0).any():
        line["early_top1"] = round(float((every[:, 0] == 0).mean()), 4)
    return line


def tokens_per_call(ranks: Sequence[np.ndarray], width: int) -> float:
    """Tokens per call of decoding the documents' own text with each stream's `width` best as a full tree.

    Row i's streams draft what follows the token after i; a call accepts the leading right ones and adds
    the model's own token, whose streams come next. The prompt's call is not counted.
    """
    tokens = calls = 0
    for rows in ranks:
        right = (rows[:, 1:] >= 0) & (rows[:, 1:] < width)
        accepted = np.cumprod(right, axis=1).sum(1)
        position, last = 0, len(rows) - 1
        while position < last:
            position += 1 + int(accepted[position])
            calls += 1
        tokens += last
    return tokens / max(1, calls)
