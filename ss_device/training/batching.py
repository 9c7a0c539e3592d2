"""Batches of documents of similar length: little padding, order fixed by the seed alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ss_device.training.corpus import Document


def plan_batches(
    lengths: Sequence[int], tokens_per_batch: int, rng: np.random.Generator, pool: int = 24
) -> list[list[int]]:
    """Split documents 0..n-1 (kept roughly in order) into batches of at most `tokens_per_batch`.

    Documents are sorted by length inside windows of about `pool` batches, cut into batches of
    `rows × longest ≤ tokens_per_batch`, and the batches of a window are shuffled.
    """
    batches: list[list[int]] = []
    window: list[int] = []
    size = 0
    for index, length in enumerate(lengths):
        window.append(index)
        size += length
        if size >= pool * tokens_per_batch or index == len(lengths) - 1:
            batches.extend(_cut(window, lengths, tokens_per_batch, rng))
            window, size = [], 0
    return batches


def _cut(window, lengths, tokens_per_batch, rng) -> list[list[int]]:
    ordered = sorted(window, key=lambda i: lengths[i])
    batches, batch = [], []
    for index in ordered:
        if batch and (len(batch) + 1) * lengths[index] > tokens_per_batch:
            batches.append(batch)
            batch = []
        batch.append(index)
    batches.append(batch)
    return [batches[i] for i in rng.permutation(len(batches))]


def collate(
    documents: Sequence[Document], pad_id: int, prompt_weight: float, multiple: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded token ids [B, T] and loss weights [B, T] of each token *as a target*.

    The first token and padding weigh 0, generated tokens 1, given ones `prompt_weight`. T is the
    longest document's length, rounded up to a `multiple`.
    """
    width = -(-max(len(d.ids) for d in documents) // multiple) * multiple
    ids = np.full((len(documents), width), pad_id, np.int64)
    weights = np.zeros((len(documents), width), np.float32)
    for row, document in enumerate(documents):
        length = len(document.ids)
        ids[row, :length] = document.ids
        weights[row, :length] = prompt_weight
        for first, end in document.generated:
            weights[row, first:end] = 1.0
        weights[row, 0] = 0.0
    return ids, weights
