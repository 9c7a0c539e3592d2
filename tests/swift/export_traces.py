"""Writes what the Swift tests compare with: recorded steps of the Python side.

    python -m tests.swift.export_traces traces    the committed test resources (small, made by us)
    python -m tests.swift.export_traces bundle    build/swift-tiny: a tiny random bundle and its answers

Most logits are not stored: they come from a formula of a 64-bit key that is exact in float32 on both sides
(`hash_logits`). Those of a small random model are stored in half precision. Trees whose order hangs on less
than float32 rounding are left out, so that the traces hold on every machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ss_device import tree as trees
from ss_device.acceptance import walk
from ss_device.decoding import Drafter, decode
from ss_device.sampling import Sampler, Sampling, draw, keyed_uniform
from ss_device.step_model import Proposal, StepLimits, Verified
from ss_device.tree import BigramBias, DraftTree, root_only

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "apps/swift/Tests"
RESOURCES = TESTS / "SpeculativeStreamingTests/Resources"
INPUT_RESOURCES = TESTS / "SpeculativeStreamingCoreMLTests/Resources"
SHAPES = ("best-first", "chain", "k-ary")
KINDS = ("smooth", "ties")


def splitmix64(values: np.ndarray) -> np.ndarray:
    """Vigna's finaliser on uint64 arrays."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def hash_logits(key: int, rows: int, vocab: int, kind: str = "smooth") -> np.ndarray:
    """float32 [rows, vocab] from a key: 14·u⁴ of 24-bit uniforms, or whole numbers 0 … 7 with many ties."""
    mixed = splitmix64(np.uint64(key) ^ splitmix64(np.arange(rows * vocab, dtype=np.uint64)))
    if kind == "ties":
        return (mixed >> np.uint64(61)).astype(np.float32).reshape(rows, vocab)
    u = (mixed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    u = u * u
    return (u * u * np.float32(14)).reshape(rows, vocab)


def hash_bias(key: int, vocab: int, rank: int) -> BigramBias | None:
    """u, v [vocab, rank] in -1 … 1 from a key; None for rank 0."""
    if not rank:
        return None
    factors = []
    for offset in (1, 2):
        mixed = splitmix64(np.uint64(key + offset) ^ splitmix64(np.arange(vocab * rank, dtype=np.uint64)))
        u = (mixed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
        factors.append(u.reshape(vocab, rank))
    return BigramBias(*factors)


class Columns:
    """Arrays that grow row by row, with how many numbers every row added."""

    def __init__(self) -> None:
        self._parts: dict[str, list[np.ndarray]] = {}

    def add(self, dtype=np.int32, **values) -> None:
        for name, value in values.items():
            self._parts.setdefault(name, []).append(np.atleast_1d(np.asarray(value)).ravel().astype(dtype))

    def arrays(self) -> dict[str, np.ndarray]:
        """name → all numbers; name.count → how many per row."""
        joined = {name: np.concatenate(parts) for name, parts in self._parts.items()}
        counts = {
            f"{n}.count": np.array([len(p) for p in parts], np.int32) for n, parts in self._parts.items()
        }
        return joined | counts


# ---- trees, masks, walks ---------------------------------------------------------------------------


@dataclass(frozen=True)
class TreeCase:
    """One tree to grow; stop_modulus: ids divisible by it are stop ids (0: none)."""

    key: int
    vocab: int
    streams: int
    nodes: int
    shape: str
    top_k: int
    rank: int
    kind: str
    root: int
    max_depth: int
    stop_modulus: int

    def grow(self) -> DraftTree:
        logits = hash_logits(self.key, self.streams, self.vocab, self.kind)
        stops = frozenset(range(0, self.vocab, self.stop_modulus)) if self.stop_modulus else frozenset()
        bias = hash_bias(self.key, self.vocab, self.rank)
        drafter = Drafter(self.nodes, self.shape, self.top_k, bias)
        return drafter.grow(Proposal(self.root, logits), stops, self.max_depth)


def tree_cases(count: int, seed: int = 0):
    """Random cases; the order of a tie-free tree must not hang on rounding (see `is_robust`)."""
    rng = np.random.default_rng(seed)
    while count:
        vocab = int(rng.choice([7, 40, 300, 1000, 5000]))
        kind = KINDS[int(rng.random() < 0.25)]
        case = TreeCase(
            key=int(rng.integers(1, 2**62)),
            vocab=vocab,
            streams=int(rng.integers(1, 6)),
            nodes=int(rng.choice([1, 2, 5, 8, 12, 32, 64])),
            shape=SHAPES[int(rng.choice([0, 0, 0, 0, 1, 2]))],
            top_k=int(rng.integers(1, 5)),
            rank=0 if kind == "ties" else int(rng.choice([0, 0, 3, 8])),
            kind=kind,
            root=int(rng.integers(vocab)),
            max_depth=int(rng.choice([0, 1, 2, 3, 99, 99, 99])),
            stop_modulus=int(rng.choice([0, 0, 0, 5])),
        )
        if is_robust(case):
            count -= 1
            yield case


def is_robust(case: TreeCase) -> bool:
    """Whether the tree is the same in float64: no choice in it hangs on float32 rounding.

    Ties of whole numbers are exact inside a row; between rows they are only exact when both sides round
    alike, so such a tree must also come out of float64 arithmetic.
    """
    return np.array_equal(case.grow().tokens, _in_double(case).tokens) and all(
        np.array_equal(case.grow().parents, _in_double(case, scale).parents)
        for scale in (1.0, 1 - 1e-6, 1 + 1e-6)
    )


def _in_double(case: TreeCase, scale: float = 1.0) -> DraftTree:
    """The case's tree with a log-softmax in float64, its normaliser off by `scale`."""
    original = trees.log_softmax

    def exact(logits: np.ndarray) -> np.ndarray:
        shifted = logits.astype(np.float64) - logits.max()
        return (shifted - scale * np.log(np.exp(shifted).sum())).astype(np.float64)

    trees.log_softmax = exact
    try:
        return case.grow()
    finally:
        trees.log_softmax = original


def export_trees(path: Path, count: int = 420) -> None:
    """Cases with their trees, padded ancestor masks and a walk each."""
    rng = np.random.default_rng(1)
    columns = Columns()
    for case in tree_cases(count):
        tree = case.grow()
        columns.add(np.int64, key=case.key)
        columns.add(
            vocab=case.vocab,
            streams=case.streams,
            nodes=case.nodes,
            shape=SHAPES.index(case.shape),
            top_k=case.top_k,
            rank=case.rank,
            kind=KINDS.index(case.kind),
            root=case.root,
            max_depth=case.max_depth,
            stop_modulus=case.stop_modulus,
            tokens=tree.tokens,
            parents=tree.parents,
            depths=tree.depths,
        )
        columns.add(np.uint8, mask=np.packbits(tree.ancestor_mask(tree.num_nodes + 3)))
        kept, chosen = random_choices(rng, tree, case.vocab)
        columns.add(kept=kept, chosen=chosen, path=walk(tree, kept, chosen))
    save_file(columns.arrays(), path)


def random_choices(rng: np.random.Generator, tree: DraftTree, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """A kept set closed under ancestors, and a token per kept node that often is one of its children's."""
    kept = [0]
    for node in range(1, tree.num_nodes):
        if tree.parents[node] in kept and rng.random() < 0.85:
            kept.append(node)
    chosen = []
    for node in kept:
        children = tree.children(node)
        drafted = children and rng.random() < 0.75
        chosen.append(int(tree.tokens[rng.choice(children)]) if drafted else int(rng.integers(vocab)))
    return np.array(kept, np.int32), np.array(chosen, np.int32)


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


def random_sampling(rng: np.random.Generator) -> Sampling:
    return Sampling(
        temperature=float(rng.choice([0.3, 0.7, 1.0, 1.7])),
        top_k=int(rng.choice([0, 1, 5, 20])),
        top_p=float(rng.choice([1.0, 0.9, 0.5])),
        min_p=float(rng.choice([0.0, 0.05, 0.3])),
        seed=int(rng.integers(0, 2**62)),
    )


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
        accepted = walk(tree, kept, chosen)[-1]
        return Verified(kept, chosen, accepted, self.streams(*self.state(accepted)), logits)

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


def add_sampling(columns: Columns, sampling: Sampling | None) -> None:
    """Settings of the choice rule; temperature 0 stands for greedy."""
    s = sampling or Sampling()
    columns.add(np.int64, seed=s.seed)
    columns.add(np.float64, settings=[s.temperature if sampling else 0.0, s.top_p, s.min_p])
    columns.add(sample_top_k=s.top_k)


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
        columns.add(accepted=verified.accepted_node)
        columns.add(np.float16, stream_logits=verified.stream_logits)
        columns.add(np.float16, path_logits=verified.logits[rows] if sampling else np.zeros(0))
    columns.add(prompt=prompt, generated=generated, calls=count)
    add_sampling(columns, sampling)


# ---- inputs of the step function -------------------------------------------------------------------


class SilentEngine:
    """Stands for a package: where it prunes it drops node 1, so that rows are not node ids."""

    def __init__(self, nodes: int, kept: int) -> None:
        self.nodes, self.kept = nodes, kept

    def make_state(self):
        return None

    def predict(self, inputs, state):
        kept = np.delete(np.arange(self.nodes), 1 if self.kept < self.nodes else [])[: self.kept]
        return {"kept": kept, "chosen": kept, "accepted": 0, "stream_logits": np.zeros((2, 4))}


def export_inputs(path: Path) -> None:
    """What `CoreMLStepModel` hands to the step function over some commits."""
    from ss_device.architecture import Architecture
    from ss_device.bundle import CoreMLFunctions
    from ss_device.config import SpeculativeConfig
    from ss_runtime.coreml.step_model import CoreMLStepModel

    rng = np.random.default_rng(4)
    columns = Columns()
    shape = Architecture("llama", 99, 8, 8, 1, 1, 1, 8, 1e-6, 1e4, 64, True)  # of which only V matters
    for nodes, kept in ((8, 8), (8, 5)):
        functions = CoreMLFunctions("", "", "", 4, nodes, kept, 40)
        engine = SilentEngine(nodes, kept)
        model = CoreMLStepModel(engine, engine, functions, SpeculativeConfig(num_streams=2), shape)
        model.prefill([3, 4, 5, 6, 7, 8])
        for _ in range(10):
            size = int(rng.integers(1, nodes + 1))
            parents = [-1, *(int(rng.integers(0, node)) for node in range(1, size))]
            tree = trees.tree_from_parents(rng.integers(0, 99, size), parents)
            slot, commit_nodes, commit_rows = model._accepted
            columns.add(limits=[nodes, kept, 40], length=model.length, slot=slot)
            columns.add(
                nodes=commit_nodes, rows=commit_rows, tree_tokens=tree.tokens, tree_parents=tree.parents
            )
            inputs = model.step_inputs(tree)
            columns.add(np.uint8, mask=np.packbits(inputs.pop("mask") == 0))
            inputs.setdefault("commit_rows", np.zeros(0, np.int32))
            columns.add(**{f"input_{name}": value for name, value in inputs.items()})
            verified = model.step(tree)
            within = [n for n in verified.kept if n < size]
            model.commit([0] if len(within) < 2 or rng.random() < 0.4 else [0, int(within[-1])])
    save_file(columns.arrays(), path)


# ---- a tiny bundle -----------------------------------------------------------------------------------


def record(target: Path) -> None:
    """`recorded`: traces of the bundle, as another machine would record them, of three other prompts."""
    from ss_runtime.commands.validate import main as ss_validate

    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("x", "SELECT b", "no")))
        words = [target / "bundle", "--record", target / "recorded", "--prompts", rows, "--device", "cpu"]
        if status := ss_validate([*map(str, words)]):
            sys.exit(status)


def write_bundle(target: Path) -> None:
    """A tiny random bundle with every part in use, and answers of the Python step model on its package.

    Then the same model divided into two and three packages, which must give the same answers, and a
    package that returns its logits, with what is drawn from those.
    """
    from ss_convert.command import main as ss_convert
    from ss_device.adapter import save_adapter
    from ss_device.bundle import open_bundle
    from ss_device.config import SpeculativeConfig
    from ss_runtime.coreml.step_model import open_executor_model
    from tests.tiny_models import make_tiny_base, random_adapter

    config = SpeculativeConfig(
        num_streams=3, num_msa_layers=2, stream_mlp="base", bigram_rank=4, bigram_shared=True
    )
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        base = make_tiny_base(models / "base" / "tiny-base", dtype="float16")
        adapter = models / "adapters" / "tiny"
        save_adapter(random_adapter(base, config), base.architecture, adapter)
        rows = [{"prompt": text} for text in ("SELECT a", "the prompt, again and again")]
        (adapter / "golden_prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        sizes = ["--nodes", "12", "--keep", "9", "--context", "96", "--chunk", "16"]
        for name, more in (
            ("bundle", []),
            ("parts-2", ["--parts", "2", "--target", "coreml"]),
            ("parts-3", ["--parts", "3", "--target", "coreml"]),
            ("sampling", ["--sampling", "--target", "coreml", "--no-golden"]),
        ):
            output = str(target / name)
            if status := ss_convert(
                ["--adapter", "tiny", "--models", str(models), "--output", output, *sizes, *more]
            ):
                sys.exit(status)
    record(target)
    answers = python_answers(target / "bundle")
    for name in ("parts-2", "parts-3"):
        if python_answers(target / name) != answers:
            sys.exit(f"{name} does not answer as the model in one package does")
    (target / "answers.json").write_text(json.dumps(answers) + "\n")
    sampling = open_bundle(target / "sampling")
    model = open_executor_model(sampling, sampling.adapter())
    written = json.dumps(
        sampled_answers(model, Drafter(12, bigram_bias=sampling.bigram_bias(sampling.adapter())))
    )
    (target / "sampled.json").write_text(written + "\n")


def python_answers(folder: Path) -> list[dict]:
    """Prompts with the tokens, calls, trees and text that the Python step model gives on a package."""
    from ss_device.bundle import open_bundle
    from ss_runtime.coreml.step_model import open_executor_model
    from ss_runtime.tokenization import load_tokenizer

    bundle = open_bundle(folder)
    tiny, tokenizer = bundle.adapter(), load_tokenizer(bundle)
    answers = []
    for text in ("SELECT a", "a much longer prompt than one chunk of sixteen", "x"):
        prompt = tokenizer.encode(text)
        drafter = Drafter(tiny.num_nodes, bigram_bias=bundle.bigram_bias(tiny))
        steps = list(decode(open_executor_model(bundle, tiny), drafter, prompt, 16, frozenset({2})))
        tokens = [int(token) for step in steps for token in step.tokens]
        trees = [[step.tree.tokens.tolist(), step.tree.parents.tolist()] for step in steps[1:]]
        answers.append(
            {
                "prompt": prompt,
                "tokens": tokens,
                "calls": len(steps) - 1,
                "trees": trees,
                "text": tokenizer.decode([t for t in tokens if t != 2]),
            }
        )
    return answers


def sampled_answers(model, drafter: Drafter) -> dict:
    """Of a package that returns logits: sampled texts, and one step's streams at every kept node.

    For those the host's choice leads the walk to each kept node in turn: [K][γ] largest logits.
    """
    prompt, runs = [70, 71, 72, 90, 71], []
    for seed in range(3):
        sampler = Sampler(Sampling(temperature=0.8, top_k=30, seed=seed))
        steps = list(decode(model, drafter, prompt, 16, frozenset({2}), sampler))
        runs.append({"seed": seed, "tokens": [t for s in steps for t in s.tokens], "calls": len(steps) - 1})
    tree, largest = drafter.grow(model.prefill(prompt), frozenset(), 3), []
    kept = model.step(tree).kept.tolist()
    for node in kept:
        verified = model.step(tree, partial(_lead_to, tree, node))
        assert verified.accepted_node == node
        largest.append(verified.stream_logits.max(axis=-1).tolist())
    nodes = {"tokens": tree.tokens.tolist(), "parents": tree.parents.tolist(), "kept": kept}
    return {"prompt": prompt, "runs": runs, **nodes, "largest": largest}


def _lead_to(tree: DraftTree, node: int, kept: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """A choice at every kept node that lets the walk end at `node`."""
    path = tree.path(node)
    follow = {v: int(tree.tokens[child]) for v, child in zip(path, path[1:], strict=False)}
    return np.array([follow.get(int(v), -1) for v in kept], np.int32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("traces", "bundle"))
    parser.add_argument(
        "--output", type=Path, default=ROOT / "build/swift-tiny", help="folder of the bundle"
    )
    arguments = parser.parse_args()
    if arguments.what == "bundle":
        write_bundle(arguments.output)
        return 0
    for folder in (RESOURCES, INPUT_RESOURCES):
        folder.mkdir(parents=True, exist_ok=True)
    export_trees(RESOURCES / "trees.safetensors")
    export_noise(RESOURCES / "noise.safetensors")
    export_decoding(RESOURCES / "decoding.safetensors")
    export_reference(RESOURCES / "reference.safetensors")
    export_inputs(INPUT_RESOURCES / "inputs.safetensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
