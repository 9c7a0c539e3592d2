"""Tokens per call from the model's own text: one forward pass instead of a decoding run per tree.

Where the main stream does not see streams (lossless mode; shared mode without `main_attends_streams`) the
text is the same whatever is drafted, and a position's draft depends on that text alone. So the text is
generated once, in batches and by Hugging Face; one pass over it gives the stream logits of every
position; and the walk of any tree is read off by comparing drafted tokens with the text. The result is
the decoding loop's own (a test compares them), for many trees at the price of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ss_device.decoding import Drafter
from ss_device.errors import UserError
from ss_device.evaluation.acceptance import AcceptanceCounts
from ss_device.reference.stream_model import StreamModel
from ss_device.step_model import Proposal
from ss_device.training.batching import plan_batches
from ss_device.training.corpus import Document
from ss_device.training.losses import forward, make_batch
from ss_device.tree import DraftTree


@torch.no_grad()
def replay_continuations(
    model: StreamModel,
    drafters: Sequence[Drafter],
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    stop_ids: frozenset[int],
    max_tokens: int,
    tokens_per_batch: int = 2048,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[list[AcceptanceCounts]]:
    """Counts for each drafter and prompt; merged, what `acceptance.measure` would give.

    prompts, outputs: token ids; an output is the model's own greedy continuation, at most
    `max_tokens` long, its end token included. A drafter may use fewer streams than the model has.
    Raises UserError for a model whose main stream sees its streams.
    """
    if model.config.main_attends_streams:
        raise UserError("replay needs a main stream that does not see streams; decode step by step")
    documents = [
        Document(np.array([*p, *o], np.int32), len(p)) for p, o in zip(prompts, outputs, strict=True)
    ]
    counts = [[AcceptanceCounts() for _ in documents] for _ in drafters]
    order = plan_batches([len(d.ids) for d in documents], tokens_per_batch, np.random.default_rng(0))
    done = 0
    for batch in order:
        logits = stream_logits(model, [documents[i] for i in batch])
        for row, index in enumerate(batch):
            for drafter, count in zip(drafters, counts, strict=True):
                replay_continuation(
                    drafter, logits[row], prompts[index], outputs[index], stop_ids, max_tokens, count[index]
                )
        done += len(batch)
        report(done, len(documents))
    return counts


def stream_logits(model: StreamModel, documents: Sequence[Document]) -> np.ndarray:
    """Stream logits without bigram bias, float32 [B, P, γ, V]; row r decides completion token r."""
    batch = make_batch(documents, model.config.num_streams)
    device = next(model.parameters()).device
    out = forward(model, batch.to(device), main=False, early=False, bias=False)
    return out.streams.float().cpu().numpy()


def replay_continuation(
    drafter: Drafter,
    logits: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: frozenset[int],
    max_tokens: int,
    counts: AcceptanceCounts,
) -> None:
    """Walk one text and add to `counts`. logits [≥ len(output), γ, V]; prompt, output: token ids.

    The root of a call is token r, drafted below by row r; with a tokens accepted the next root is
    token r + a + 1, which the last accepted node chose.
    """
    root, before = 0, (counts.tokens, counts.calls)
    history, known = drafter.start(prompt), 0
    while root < len(output) - 1:
        if history is not None:
            history.extend(output[known : root + 1])
            known = root + 1
        left = max_tokens - root - 1
        tree = drafter.grow(Proposal(int(output[root]), logits[root]), stop_ids, left - 1, history)
        path = accepted_path(tree, output[root + 1 :])
        emitted = min(len(path), len(output) - 1 - root)
        counts.add(tree, path, emitted, tree.num_nodes)
        root += len(path)
    counts.end_prompt(*before)


def accepted_path(tree: DraftTree, following: Sequence[int]) -> list[int]:
    """Node ids from the root along the children equal to the tokens that follow."""
    path = [0]
    for token in following:
        children = [c for c in tree.children(path[-1]) if tree.tokens[c] == token]
        if not children:
            break
        path.append(children[0])
    return path
