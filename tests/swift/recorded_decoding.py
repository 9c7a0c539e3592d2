"""Recorded noise, draws and whole generations, greedy and sampled.

The generations are those of models that Swift computes as well (`HashModel`), and of a small random model
on the reference, whose answers the Swift tests play back.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ss_device.acceptance import walk
from ss_device.decoding import Drafter, decode
from ss_device.sampling import Sampling, draw, keyed_uniform
from ss_device.step_model import Proposal, StepLimits, Verified
from ss_device.tree import DraftTree, root_only
from tests.swift.recorded_columns import (
    KINDS,
    SHAPES,
    Columns,
    add_sampling,
    hash_bias,
    hash_logits,
    random_sampling,
)

# ---- noise -----------------------------------------------------------------------------------------


def export_noise(path: Path) -> None:
    """Keyed uniforms, and draws from filtered distributions."""
    rng = np.random.default_rng(2)
    columns = Columns()
    for index in range(300):
        seed, position = int(rng.integers(0, 2**63)), int(rng.integers(0, 5000)) if index else 0
        columns.add(np.int64, seed=seed, position=position)
        columns.add(np.float64, uniform=keyed_uniform(seed, position))
    for _ in range(150):
        key, vocab = int(rng.integers(1, 2**62)), int(rng.choice([3, 40, 500]))
        kind = KINDS[int(rng.random() < 0.4)]
        sampling = random_sampling(rng)
        logits = hash_logits(key, 1, vocab, kind)[0]
        probabilities = sampling.probabilities(logits)
        columns.add(np.int64, draw_key=key, draw_seed=sampling.seed)
        columns.add(np.float64, draw_settings=[sampling.temperature, sampling.top_p, sampling.min_p])
        columns.add(draw_vocab=vocab, draw_kind=KINDS.index(kind), draw_top_k=sampling.top_k)
        columns.add(draw_tokens=[sampling.choose(logits, position) for position in range(20)])
        columns.add(draw_support=np.nonzero(probabilities)[0])
        columns.add(np.float64, draw_largest=probabilities.max())
        assert draw(probabilities, 0.0) == np.nonzero(probabilities)[0][0]
    save_file(columns.arrays(), path)


# ---- decoding --------------------------------------------------------------------------------------


@dataclass
class HashModel:
    """A step model whose logits are a formula of the last two tokens: the same in Swift.

    Streams follow the model's own greedy continuation with some noise, so that drafts are often right.
    """

    key: int
    vocab: int
    limits: StepLimits
    text: list[int] = field(default_factory=list)
    tree: DraftTree | None = None

    def main(self, before: int, last: int) -> np.ndarray:
        return hash_logits(self.key + 1_000_003 * before + last, 1, self.vocab)[0]

    def streams(self, before: int, last: int) -> np.ndarray:
        rows = []
        for stream in range(self.limits.num_streams):
            before, last = last, int(self.main(before, last).argmax())
            noise = hash_logits(self.key + 17 + stream + 31 * last, 1, self.vocab)[0]
            rows.append(self.main(before, last) + np.float32(0.5) * noise)
        return np.stack(rows)

    def prefill(self, tokens) -> Proposal:
        self.text = [0, *tokens]
        verified = self.step(root_only(self.text.pop()))
        self.commit([0])
        self.prefill_logits = verified.logits[0]
        return Proposal(int(verified.chosen[0]), verified.stream_logits)

    def state(self, node: int) -> tuple[int, int]:
        """The last two tokens at a node of the tree."""
        path = [*self.text[-1:], *(int(self.tree.tokens[n]) for n in self.tree.path(node))]
        return path[-2], path[-1]

    def step(self, tree: DraftTree) -> Verified:
        self.tree = tree
        logits = np.stack([self.main(*self.state(n)) for n in range(tree.num_nodes)])
        kept, chosen = np.arange(tree.num_nodes), logits.argmax(-1)
        accepted_node = walk(tree, kept, chosen)[-1]
        streams = self.streams(*self.state(accepted_node))
        return Verified(kept, chosen, accepted_node, streams, logits)

    def streams_of(self, node: int) -> np.ndarray:
        return self.streams(*self.state(node))

    def commit(self, path) -> None:
        self.text += [int(self.tree.tokens[n]) for n in path]


class HalfRounded:
    """A step model with its logits in half precision, as a package stores them; it remembers them."""

    def __init__(self, model) -> None:
        self.model, self.limits, self.last = model, model.limits, None

    def prefill(self, tokens) -> Proposal:
        self.model.prefill(tokens[:-1])  # lossless streams change nothing; what is left is the last token
        verified = self.step(root_only(int(tokens[-1])))
        self.commit([0])
        self.prefill_logits = verified.logits[0]
        return Proposal(int(verified.chosen[0]), verified.stream_logits)

    def step(self, tree: DraftTree) -> Verified:
        found = self.model.step(tree)
        logits, streams = _half(found.logits), _half(found.stream_logits)
        chosen = logits.argmax(-1).astype(np.int32)
        assert walk(tree, found.kept, chosen)[-1] == found.accepted_node, (
            "rounding moved the walk: another seed"
        )
        self.last = replace(found, chosen=chosen, logits=logits, stream_logits=streams)
        return self.last

    def streams_of(self, node: int) -> np.ndarray | None:
        return self.last.stream_logits if node == self.last.accepted_node else None

    def commit(self, path) -> None:
        self.model.commit(path)


def _half(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float16).astype(np.float32)


def sampled_decode(model, drafter: Drafter, prompt, max_tokens: int, stop_ids, sampling: Sampling):
    """The decoding loop with keyed sampling: every node of the walk draws its token with the noise of its
    position. Yields (tree, verified, path, emitted) per call, the prefill's without a tree."""
    proposal = model.prefill(prompt)
    length = len(prompt)
    root, streams = sampling.choose(model.prefill_logits, length), proposal.stream_logits
    yield None, None, [], [root]
    left = max_tokens - 1
    while left > 0 and root not in stop_ids:
        draft = Proposal(root, streams) if streams is not None else None
        tree = drafter.grow(draft, stop_ids, left - 1) if draft else root_only(root)
        verified = model.step(tree)
        chosen = [
            sampling.choose(row, length + int(tree.depths[node]) + 1)
            for node, row in zip(verified.kept, verified.logits, strict=True)
        ]
        path = walk(tree, np.asarray(verified.kept), np.asarray(chosen))
        correction = chosen[list(verified.kept).index(path[-1])]
        streams = model.streams_of(path[-1])
        emitted = [int(tree.tokens[n]) for n in path[1:]] + [correction]
        emitted = emitted[: next((i + 1 for i, t in enumerate(emitted) if t in stop_ids), left)][:left]
        left -= len(emitted)
        model.commit(path)
        length += len(path)
        yield tree, verified, path, emitted
        root = correction
        if emitted[-1] in stop_ids:
            return


def greedy_decode(model, drafter: Drafter, prompt, max_tokens: int, stop_ids):
    """The project's own loop, as tuples like `sampled_decode`'s."""
    for step in decode(model, drafter, prompt, max_tokens, stop_ids):
        yield step.tree, step.verified, step.path, step.tokens


def export_decoding(path: Path, count: int = 36) -> None:
    """Whole generations of hash models: settings, and per call the tree, the path and the new tokens."""
    rng = np.random.default_rng(3)
    columns = Columns()
    for index in range(count):
        key, vocab, streams = (
            int(rng.integers(1, 2**61)),
            int(rng.choice([20, 200, 600])),
            int(rng.integers(1, 5)),
        )
        nodes = int(rng.choice([1, 5, 12, 32]))
        rank = 0 if index % 3 else 4
        context = int(rng.choice([20, 512]))
        model = HashModel(key, vocab, StepLimits(32, 32, streams, context))
        shape = SHAPES[int(rng.choice([0, 0, 1, 2]))]
        drafter = Drafter(nodes, shape, 3, hash_bias(key, vocab, rank))
        prompt = [int(t) for t in rng.integers(0, vocab, int(rng.integers(1, 6)))]
        max_tokens = int(rng.integers(1, 48))
        stop_ids = frozenset({int(rng.integers(vocab))}) if index % 4 == 0 else frozenset()
        sampling = random_sampling(rng) if index % 2 else None
        budget = min(max_tokens, context - len(prompt) + 1)
        arguments = (model, drafter, prompt, budget, stop_ids)
        calls = list(sampled_decode(*arguments, sampling) if sampling else greedy_decode(*arguments))
        columns.add(np.int64, key=key)
        columns.add(
            vocab=vocab, streams=streams, nodes=nodes, shape=SHAPES.index(shape), rank=rank, context=context
        )
        columns.add(prompt=prompt, max_tokens=max_tokens, stop_ids=sorted(stop_ids), calls=len(calls) - 1)
        add_sampling(columns, sampling)
        columns.add(generated=[t for _, _, _, emitted in calls for t in emitted])
        for tree, _, path_nodes, emitted in calls[1:]:
            columns.add(call_tokens=tree.tokens, call_parents=tree.parents, call_path=path_nodes)
            columns.add(call_emitted=emitted)
    save_file(columns.arrays(), path)


# ---- a small random model on the reference ---------------------------------------------------------


def export_reference(path: Path) -> None:
    """Generations of a random Llama with random streams: stream logits [γ, V] of every accepted node, and
    the main logits along every path, in half precision."""
    from ss_device.config import SpeculativeConfig
    from ss_device.reference.step_model import ReferenceStepModel
    from ss_device.reference.stream_model import load_stream_model
    from tests.tiny_models import make_tiny_base, random_adapter

    config = SpeculativeConfig(num_streams=3, num_msa_layers=2, stream_mlp="base", stream_adapter_rank=4)
    columns = Columns()
    with tempfile.TemporaryDirectory() as folder:
        base = make_tiny_base(Path(folder) / "base", vocab_size=280)
        stream_model = load_stream_model(base, random_adapter(base, config))
        model = HalfRounded(ReferenceStepModel(stream_model, 12))
        for index in range(8):
            sampling = Sampling(temperature=0.6, top_k=20, seed=index) if index % 2 else None
            prompt = [1, 5 + index, 60, 61 + index]
            arguments = (model, Drafter(12), prompt, 24, frozenset())
            calls = sampled_decode(*arguments, sampling) if sampling else greedy_decode(*arguments)
            add_reference(columns, model, prompt, sampling, calls)
    save_file(columns.arrays(), path)


def add_reference(columns: Columns, model: HalfRounded, prompt, sampling, calls) -> None:
    """One generation; draft logits belong to the tree of the call that follows."""
    count, generated = 0, []
    for number, (tree, verified, path, emitted) in enumerate(calls):
        generated += emitted
        if number == 0:
            columns.add(
                np.float16, first_logits=model.prefill_logits, first_streams=model.last.stream_logits
            )
            continue
        count += 1
        rows = [int(np.searchsorted(verified.kept, n)) for n in path]
        columns.add(tokens=tree.tokens, parents=tree.parents, chosen=verified.chosen, path=path)
        columns.add(accepted_node=verified.accepted_node)
        columns.add(np.float16, stream_logits=verified.stream_logits)
        columns.add(np.float16, path_logits=verified.logits[rows] if sampling else np.zeros(0))
    columns.add(prompt=prompt, generated=generated, calls=count)
    add_sampling(columns, sampling)
