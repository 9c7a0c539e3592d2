"""A bigram bias trained once per base: which token follows which in the texts of its applications.

Adapters that share it freeze it, so an application costs little more than its streams
(docs/method.md, SS+). The bias alone is a low-rank bigram model, `log p(child | parent) ∝ u[parent] @ v.T`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save
from torch.nn import functional

from ss_device.base_model import BaseFolder, BaseIdentity
from ss_device.errors import UserError
from ss_device.files import read_tensors
from ss_device.old_names import TENSORS, renamed
from ss_device.outputs import file_in_one_go
from ss_device.reference.device import chosen_device
from ss_device.reference.stream_parameters import BigramBiasFactors
from ss_device.training.corpus import Document
from ss_device.training.settings import BigramBiasSettings

NAMES = ("bigram.u", "bigram.v")


def bigram_counts(documents: Sequence[Document]) -> tuple[np.ndarray, np.ndarray]:
    """Distinct (parent, child) pairs [n, 2] of generated text, sorted by parent, and their counts [n].

    Both tokens lie in the same generated span, as every parent and target of a stream do: what a user says
    between two answers of a chat does not count.
    """
    pairs = [
        np.stack([d.ids[first : end - 1], d.ids[first + 1 : end]], 1)
        for d in documents
        for first, end in d.generated
        if end - first > 1
    ]
    if not pairs:
        raise UserError("bigram bias: no generated span has two tokens")
    return np.unique(np.concatenate(pairs).astype(np.int64), axis=0, return_counts=True)


def train_bigram_bias(
    documents: Sequence[Document],
    vocab_size: int,
    settings: BigramBiasSettings,
    report: Callable[[dict], None] = lambda record: None,
    device: str | None = None,
) -> dict[str, np.ndarray]:
    """Factors `bigram.u`, `bigram.v` [V, rank] that maximise the likelihood of the documents' bigrams.

    Full softmax over the vocabulary, batches of distinct parents weighted by their counts. device: `cpu`,
    `cuda` or `mps` (None: what is there); the factors start as on the CPU.
    """
    where, epochs = chosen_device(device), settings.epochs
    torch.manual_seed(settings.seed)
    pairs, counts = bigram_counts(documents)
    parents, starts = np.unique(pairs[:, 0], return_index=True)
    bounds = np.append(starts, len(pairs))
    factors = BigramBiasFactors(vocab_size, settings.rank).to(where)
    optimizer = torch.optim.AdamW(factors.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    rng = np.random.default_rng(settings.seed)
    batches = -(-len(parents) // settings.parents_per_batch)
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * (1 - epoch / epochs)
        total = 0.0
        for chosen in np.array_split(rng.permutation(len(parents)), batches):
            loss, weight = _negative_log_likelihood(factors, parents, bounds, pairs, counts, chosen)
            (loss / weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            total += float(loss.detach())
        report({"step": epoch + 1, "steps": epochs, "loss": round(total / counts.sum(), 4)})
    return {f"bigram.{n}": p.detach().cpu().numpy() for n, p in factors.named_parameters()}


def _negative_log_likelihood(factors, parents, bounds, pairs, counts, chosen):
    """Summed over the bigrams of the parents `chosen`, and the number of those bigrams."""
    rows = np.concatenate([np.arange(bounds[p], bounds[p + 1]) for p in chosen])
    owner = np.repeat(np.arange(len(chosen)), bounds[chosen + 1] - bounds[chosen])
    where = factors.u.device
    log_probs = functional.log_softmax(factors(torch.from_numpy(parents[chosen]).to(where)), -1)
    weights = torch.from_numpy(counts[rows]).float().to(where)
    found = log_probs[torch.from_numpy(owner).to(where), torch.from_numpy(pairs[rows, 1]).to(where)]
    return -(found * weights).sum(), weights.sum()


def save_bigram_bias(tensors: dict[str, np.ndarray], base: BaseIdentity, path: Path) -> None:
    """Write the factors (fp16) with the tokenizer they belong to; replaced in one go."""
    half = {name: tensors[name].astype(np.float16) for name in NAMES}
    about = {"tokenizer_sha256": base.tokenizer_sha256, "base": base.name}
    with file_in_one_go(path) as temporary:
        # safetensors' own writer would leave a file of another name beside it where it is killed.
        temporary.write_bytes(save(half, about))


def load_bigram_bias(path: Path, base: BaseFolder, rank: int) -> tuple[dict[str, np.ndarray], str]:
    """Factors as float32 and the file's sha256. UserError when vocabulary, rank or names differ."""
    if not path.is_file():
        raise UserError(f"{path}: no such bigram bias file")
    tensors = renamed(read_tensors(path), TENSORS)
    expected = (base.architecture.vocab_size, rank)
    for name in NAMES:
        found = tensors[name].shape if name in tensors else None
        if found != expected:
            raise UserError(f"{path}: {name} is {found or 'missing'}, expected shape {expected}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {name: tensors[name].astype(np.float32) for name in NAMES}, digest
