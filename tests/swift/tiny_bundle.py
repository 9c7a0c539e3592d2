"""A tiny random bundle for the Swift tests, and the answers of the Python step model on its packages."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from ss_convert.command import main as ss_convert
from ss_device.adapter import save_adapter
from ss_device.bundle import open_bundle
from ss_device.config import SpeculativeConfig
from ss_device.decoding import Drafter, decode
from ss_device.sampling import Sampler, Sampling
from ss_device.tree import DraftTree
from ss_runtime.commands.validate import main as ss_validate
from ss_runtime.coreml.engines import open_executor_model
from ss_runtime.tokenization import load_tokenizer
from tests.tiny_models import make_tiny_base, random_adapter


def record(target: Path) -> None:
    """`recorded`: traces of the bundle, as another machine would record them, of three other prompts."""
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
