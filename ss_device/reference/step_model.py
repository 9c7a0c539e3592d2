"""The reference step model: prefill, step and commit in PyTorch with a tree cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ss_device.acceptance import walk
from ss_device.config import PRUNE_OVER
from ss_device.errors import UserError
from ss_device.reference.stream_model import KeysValues, Rows, StreamModel
from ss_device.step_checks import check_prompt, check_tree, kept_rows
from ss_device.step_model import Choose, Proposal, StepLimits, Verified
from ss_device.tree import DraftTree, keep_best_nodes, root_only


class ReferenceStepModel:
    """StepModel over a StreamModel, one sequence.

    num_kept < num_nodes prunes by early exit before the MSA layers; `prune_over` normalises edge
    scores over the draft's own tokens or the whole vocabulary (docs/method.md, Pruning).
    last: what the last call gave, the prefill's too, of which a `Proposal` shows no main logits.
    """

    last: Verified

    def __init__(
        self,
        model: StreamModel,
        num_nodes: int,
        num_kept: int | None = None,
        context: int | None = None,
        prune_over: str = "draft",
    ) -> None:
        if prune_over not in PRUNE_OVER:
            raise UserError(f"prune_over '{prune_over}' is not one of {', '.join(PRUNE_OVER)}")
        kept = num_nodes if num_kept is None else num_kept
        if not 1 <= kept <= num_nodes:
            raise UserError(f"kept nodes {kept} must lie between 1 and the {num_nodes} nodes")
        self.model = model
        self.prune_over = prune_over
        self.limits = StepLimits(
            num_nodes=num_nodes,
            num_kept=kept,
            num_streams=model.config.num_streams,
            context=context or model.architecture.default_context,
            vocab_size=model.architecture.vocab_size,
        )
        self.cache: list[KeysValues | None] = [None] * model.architecture.num_layers
        self._scratch: list[KeysValues] = []
        self._kept = np.zeros(0, np.int32)

    @property
    def length(self) -> int:
        """Committed positions."""
        return 0 if self.cache[0] is None else self.cache[0][0].shape[2]

    @torch.no_grad()
    def prefill(self, tokens: Sequence[int], choose: Choose | None = None) -> Proposal:
        """All but the last prompt token without streams; the last one as a one-node tree with them."""
        check_prompt(self.limits, tokens)
        self.cache = [None] * len(self.cache)
        if len(tokens) > 1:
            earlier = np.array(tokens[:-1], np.int64)
            rows = self._rows(earlier, np.arange(len(earlier)), None)
            for index in range(len(self.cache)):
                rows, self.cache[index] = self.model.layer(index, rows, None)
        verified = self.step(root_only(int(tokens[-1])), choose)
        self.commit([0])
        return Proposal(int(verified.chosen[0]), verified.stream_logits)

    @torch.no_grad()
    def step(self, tree: DraftTree, choose: Choose | None = None) -> Verified:
        """Verify a tree; see `StepModel`. `Verified.logits` holds the main logits [K', V]."""
        n, first_msa_layer = self.length, self.model.first_msa_layer
        check_tree(self.limits, tree, n)
        rows = self._rows(tree.tokens, n + tree.depths, tree)
        self._scratch = []
        for index in range(first_msa_layer):
            rows, new = self.model.layer(index, rows, self.cache[index])
            self._scratch.append(new)
        self._kept = np.arange(tree.num_nodes, dtype=np.int32)
        if tree.num_nodes > self.limits.num_kept:
            scores = node_scores(self.model, rows.main[0], tree, self.prune_over)
            self._kept = keep_best_nodes(scores, self.limits.num_kept).astype(np.int32)
            rows = _select(rows, self._here(self._kept), n)
        rows = self.model.start_streams(rows, self._here(np.arange(len(self._kept)))[None])
        for index in range(first_msa_layer, len(self.cache)):
            rows, new = self.model.layer(index, rows, self.cache[index])
            self._scratch.append(new)
        self.last = self._verified(tree, rows, choose)
        return self.last

    def commit(self, path: Sequence[int]) -> None:
        """Append the path's keys and values; lower layers hold all nodes, upper ones the kept."""
        nodes, among_kept = self._here(np.array(path)), self._here(kept_rows(self._kept, path))
        for index, (keys, values) in enumerate(self._scratch):
            chosen = nodes if index < self.model.first_msa_layer else among_kept
            new = (keys[:, :, chosen], values[:, :, chosen])
            past = self.cache[index]
            joined = new if past is None else tuple(torch.cat(p, 2) for p in zip(past, new, strict=True))
            self.cache[index] = joined

    def _here(self, numbers: np.ndarray) -> torch.Tensor:
        """Whole numbers as int64 on the model's device."""
        return torch.from_numpy(numbers.astype(np.int64)).to(self.model.device)

    def _rows(self, tokens: np.ndarray, positions: np.ndarray, tree: DraftTree | None) -> Rows:
        count, n = len(tokens), self.length
        among = np.tri(count, dtype=bool) if tree is None else tree.ancestor_mask()
        mask = torch.from_numpy(np.concatenate([np.ones((count, n), bool), among], 1))
        placed = self._here(positions)[None]
        hidden = self.model.embed(self._here(tokens)[None], placed)
        return Rows(hidden, placed, mask[None].to(self.model.device), context=self.limits.context)

    def _verified(self, tree: DraftTree, rows: Rows, choose: Choose | None) -> Verified:
        logits = self.model.logits(rows.main[0]).float().cpu().numpy()
        chosen = logits.argmax(-1).astype(np.int32) if choose is None else choose(self._kept, logits)
        accepted_node = walk(tree, self._kept, chosen)[-1]
        accepted_row = int(np.searchsorted(self._kept, accepted_node))
        streams = self.model.logits(rows.streams[0, accepted_row]).float().cpu().numpy()
        return Verified(self._kept, chosen, accepted_node, streams, logits)


def node_scores(model: StreamModel, hidden: torch.Tensor, tree: DraftTree, prune_over: str) -> np.ndarray:
    """Path log-probabilities [N] of the tree's nodes by the early exit; the root has 0.

    hidden [N, h] at the first MSA layer's input. `draft` normalises each parent's logits over the
    tokens of all nodes but the root (a token that stands twice counts twice), `vocabulary` over V.
    """
    columns = tree.tokens[1:].astype(np.int64)
    logits = model.early_logits(hidden).float()
    if prune_over == "draft":
        logits = logits[:, torch.from_numpy(columns).to(hidden.device)]
        columns = np.arange(tree.num_nodes - 1)
    log_probs = logits.log_softmax(-1).cpu().numpy()
    scores = np.zeros(tree.num_nodes, np.float32)
    for node in range(1, tree.num_nodes):
        parent = tree.parents[node]
        scores[node] = scores[parent] + log_probs[parent, columns[node - 1]]
    return scores


def _select(rows: Rows, index: torch.Tensor, prefix: int) -> Rows:
    """The main rows at `index` [K], their positions, their mask over the prefix and one another."""
    prefix_columns = torch.arange(prefix, device=index.device)
    columns = torch.cat([prefix_columns, prefix + index])
    return replace(
        rows,
        main=rows.main[:, index],
        positions=rows.positions[:, index],
        mask=rows.mask[:, index][:, :, columns],
    )
