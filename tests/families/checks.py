"""What every back end must show for every family, measured against Hugging Face's own forward and generate.

A back end is a step model whose `step` also leaves the main logits of the tree's nodes in `last_logits`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from ss_device.config import SpeculativeConfig
from ss_device.decoding import Drafter, decode
from ss_device.step_model import Proposal
from ss_device.tree import DraftTree, tree_from_parents
from tests.families.tiny import VOCAB

TOLERANCE = 1e-4
NODES, PROMPT, GENERATED = 8, 11, 26
KEPT = {"lossless": NODES, "shared": 6}  # shared mode is checked with pruning
LOSSLESS = SpeculativeConfig(
    num_streams=2,
    num_msa_layers=2,
    stream_mlp="base",
    stream_adapter_rank=4,
    stream_lora_rank=3,
    stream_lora_alpha=6.0,
    pruning_rank=4,
)
SHARED = SpeculativeConfig(
    mode="shared",
    num_streams=2,
    num_msa_layers=2,
    stream_mlp="base",
    stream_adapter_rank=0,
    pruning_rank=4,
    lora_rank=4,
    lora_alpha=8.0,
)
CONFIGS = {"lossless": LOSSLESS, "shared": SHARED}
SHAPES = {
    "chain": [-1, 0, 1, 2, 3, 4, 5, 6],
    "bushy": [-1, 0, 0, 1, 1, 2, 3, 3],
    "random": [-1, 0, 1, 0, 3, 3, 2, 6],
}


TURNS = (
    ("sequence", "chain"),
    ("tree", "bushy"),
    ("commits", "random"),
    ("commits", "bushy"),
    ("commits", "chain"),
)


@dataclass
class Measured:
    """Largest differences relative to the largest logit, by check; whether the text was Hugging Face's."""

    sequence: float = 0.0
    tree: float = 0.0
    commits: float = 0.0
    streams: float | None = None
    text: bool = False

    def failures(self) -> list[str]:
        """Names of the checks that failed."""
        errors = {n: getattr(self, n) for n in ("sequence", "tree", "commits", "streams")}
        # `not <=` also catches NaN.
        failed = [n for n, e in errors.items() if e is not None and not e <= TOLERANCE]
        return failed + ([] if self.text else ["text"])


def prompt_ids(length: int) -> list[int]:
    return np.random.default_rng(0).integers(3, VOCAB, length).tolist()


class Truth:
    """What a Hugging Face model says: its greedy text, and the logits of trees behind a part of it."""

    def __init__(self, model, length: int = PROMPT) -> None:
        self._model, self._known = model, {}
        self.prompt = prompt_ids(length)
        out = model.generate(
            input_ids=torch.tensor([self.prompt]),
            max_new_tokens=GENERATED,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=VOCAB + 1,  # end tokens are taken as any other
        )
        self.text = out[0, length:].tolist()

    @torch.no_grad()
    def logits(self, at: int, tree: DraftTree) -> np.ndarray:
        """Logits [N, V] of every node behind `at` tokens of the text: its path as a plain sequence."""
        key = (at, tree.tokens.tobytes(), tree.parents.tobytes())
        if key not in self._known:
            text = self.prompt + self.text[:at]
            paths = [
                text + [int(tree.tokens[n]) for n in tree.path(node)] for node in range(tree.num_nodes)
            ]
            width = max(map(len, paths))
            batch = torch.tensor([path + [0] * (width - len(path)) for path in paths])
            # Padding stands behind a causal model's last token and is seen by nobody.
            logits = self._model(input_ids=batch, attention_mask=torch.ones_like(batch)).logits
            rows = [row[len(path) - 1] for row, path in zip(logits, paths, strict=True)]
            self._known[key] = torch.stack(rows).numpy()
        return self._known[key]


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(np.asarray(found, np.float32) - wanted).max() / np.abs(wanted).max())


def random_tree(rng: np.random.Generator, shape: str, truth: list[int]) -> DraftTree:
    """A tree of this shape; nodes 0, 1 and the first grandchild of the root carry the true text."""
    tokens = rng.integers(3, VOCAB, NODES)
    parents = SHAPES[shape]
    tokens[:2] = truth[:2]
    tokens[parents.index(1)] = truth[2]
    return tree_from_parents(tokens.tolist(), parents)


def measure(back_end, truth: Truth, other=None, until_failure: bool = False) -> Measured:
    """All checks of one back end. other: a step model whose streams must agree (the reference).

    until_failure: stop at the first check that fails.
    """
    found = Measured(streams=None if other is None else 0.0)
    models = [model for model in (back_end, other) if model is not None]
    rng, at = np.random.default_rng(1), 0
    proposals = [model.prefill(truth.prompt) for model in models]
    if other is not None:
        found.streams = relative(proposals[0].stream_logits, proposals[1].stream_logits)
    for name, shape in TURNS:
        tree = random_tree(rng, shape, truth.text[at:])
        verified = back_end.step(tree)
        wanted = truth.logits(at, tree)[verified.kept]
        error = relative(back_end.last_logits[: len(verified.kept)], wanted)
        setattr(found, name, max(getattr(found, name), error))
        if other is not None:
            theirs = other.step(tree)
            assert np.array_equal(verified.kept, theirs.kept)
            found.streams = max(found.streams, relative(verified.stream_logits, theirs.stream_logits))
        if until_failure and not error <= TOLERANCE:
            return found
        path = tree.path(verified.accepted_node)
        for model in models:
            model.commit(path)
        at += len(path)
    found.text = generated(back_end, truth.prompt, truth.text) == truth.text
    return found


def generated(model, prompt: list[int], truth: list[int]) -> list[int]:
    """Text by speculation, its drafts mixed from the true continuation and noise."""
    steps = decode(_Guided(model, truth), Drafter(NODES), prompt, GENERATED, frozenset())
    return [token for step in steps for token in step.tokens]


class _Guided:
    """Random streams are hardly ever right; these are often, so that commits and rejections mix."""

    def __init__(self, model, truth: list[int]) -> None:
        self.model, self.truth, self.limits = model, truth, model.limits
        self.rng, self.emitted = np.random.default_rng(0), 0

    def prefill(self, tokens):
        proposal = self.model.prefill(tokens)
        self.emitted = 1
        return Proposal(proposal.root, self._logits(proposal.stream_logits.shape))

    def step(self, tree):
        verified = self.model.step(tree)
        self.emitted += int(tree.depths[verified.accepted_node]) + 1
        return replace(verified, stream_logits=self._logits(verified.stream_logits.shape))

    def commit(self, path):
        self.model.commit(path)

    def _logits(self, shape):
        out = self.rng.normal(0, 1, shape).astype(np.float32)
        for depth in range(shape[0]):
            if self.emitted + depth < len(self.truth):
                out[depth, self.truth[self.emitted + depth]] += self.rng.choice((0.0, 3.0, 6.0))
        return out
