"""Batched plain generation with a Hugging Face model: greedy, or sampled with keyed noise."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from ss_device.evaluation.stopping import stop_length
from ss_device.sampling import keyed_uniform
from ss_device.token_ids import is_token_id
from ss_device.training.settings import Continuation

# A stop string is looked for in this many newest tokens while generating.
TAIL = 32


def row_seed(seed: int, sample: int, prompt: Sequence[int]) -> int:
    """The noise key of one text: depends on prompt and sample, not on the batch it is made in."""
    digest = hashlib.sha256(f"{seed}:{sample}:{list(prompt)}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


@torch.no_grad()
def continuations(
    model: torch.nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    eos_ids: Sequence[int],
    settings: Continuation,
    samples: Sequence[int] | None = None,
) -> list[list[int]]:
    """Continuations (end token included) of token id lists; a stop string's last token is the end.

    samples: which sample of its prompt each row is (0 by default); same prompt, sample and settings
    give the same text in any batch, up to near ties of its sums.
    """
    device, width = next(model.parameters()).device, max(len(p) for p in prompts)
    # Padding is masked, and is looked up in the embedding all the same.
    known = model.get_input_embeddings().num_embeddings
    padding = next((i for i in eos_ids if is_token_id(i, known)), prompts[0][0])
    ids = torch.full((len(prompts), width), padding)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    # The model folder's own generation settings (penalties, sampling) would change the distribution.
    model.generation_config = GenerationConfig(eos_token_id=list(eos_ids), pad_token_id=padding)
    processors, criteria = [], []
    if settings.temperature > 0:
        numbers = samples or [0] * len(prompts)
        seeds = [row_seed(settings.seed, n, p) for n, p in zip(numbers, prompts, strict=True)]
        processors.append(KeyedSampling(settings, seeds, [len(p) for p in prompts], width))
    if settings.stop_strings:
        criteria.append(StopAtStrings(tokenizer, settings.stop_strings, width))
    out = model.generate(
        ids.to(device), attention_mask=mask.to(device), max_new_tokens=settings.max_tokens,
        do_sample=False, logits_processor=processors, stopping_criteria=criteria,
    )  # fmt: skip
    return [_trim(row, set(eos_ids), tokenizer, settings) for row in out[:, width:].tolist()]


def _trim(row: list[int], eos_ids: set[int], tokenizer: Tokenizer, settings: Continuation) -> list[int]:
    end = next((i + 1 for i, token in enumerate(row) if token in eos_ids), len(row))
    return row[: stop_length(row[:end], tokenizer, settings.stop_strings) or end]


class KeyedSampling(LogitsProcessor):
    """Leaves one token per row: the draw of `ss_device.sampling.Sampling` with the row's own key."""

    def __init__(
        self, settings: Continuation, seeds: Sequence[int], lengths: Sequence[int], width: int
    ) -> None:
        self.settings, self.seeds, self.lengths, self.width = settings, seeds, lengths, width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        made, given = input_ids.shape[1] - self.width, scores
        if scores.device.type == "mps":  # Metal has no float64
            scores = scores.cpu()
        uniform = torch.tensor(
            [keyed_uniform(s, n + made) for s, n in zip(self.seeds, self.lengths, strict=True)],
            dtype=torch.float64,
            device=scores.device,
        )
        probs = (scores.double() / self.settings.temperature).softmax(-1)
        if self.settings.top_p < 1:
            ordered, order = torch.sort(probs, dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            kept = ordered.masked_fill(before >= self.settings.top_p, 0.0)
            probs = torch.zeros_like(probs).scatter(-1, order, kept)
            probs = probs / probs.sum(-1, keepdim=True)
        cumulative = probs.cumsum(-1)
        wanted = (uniform * cumulative[:, -1])[:, None]
        chosen = torch.searchsorted(cumulative, wanted, right=True)
        # Rounding can put the product on the total itself; the last possible token is meant then.
        last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).int().argmax(-1, keepdim=True)
        chosen = torch.minimum(chosen, last)
        return torch.full_like(given, -torch.inf).scatter(-1, chosen.to(given.device), 0.0)


class StopAtStrings(StoppingCriteria):
    """Ends a row once its generated text holds a stop string."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], width: int) -> None:
        self.tokenizer, self.strings, self.width = tokenizer, strings, width
        self.tail = max(TAIL, *(len(s.encode()) + 1 for s in strings))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_) -> torch.Tensor:
        rows = input_ids[:, max(self.width, input_ids.shape[1] - self.tail) :].tolist()
        texts = self.tokenizer.decode_batch(rows, skip_special_tokens=True)
        met = [any(s in text for s in self.strings) for text in texts]
        return torch.tensor(met, device=input_ids.device)
