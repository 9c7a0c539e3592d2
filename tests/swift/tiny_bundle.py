"""A tiny random bundle for the Swift tests, and the answers of the Python step model on its packages."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from ss_convert.command import main as ss_convert
from ss_device.adapter import save_adapter
from ss_device.bundle import Bundle, BundledAdapter, open_bundle
from ss_device.config import SpeculativeConfig
from ss_device.decoding import Drafter, decode
from ss_device.sampling import Sampler, Sampling
from ss_device.tree import DraftTree
from ss_runtime.commands.validate import main as ss_validate
from ss_runtime.coreai.asset import is_installed
from ss_runtime.coreai.engines import open_coreai_model
from ss_runtime.coreml.engines import open_executor_model
from ss_runtime.function_step_model import FunctionStepModel
from ss_runtime.tokenization import load_tokenizer
from tests.tiny_models import make_tiny_base, random_adapter

Opener = Callable[[Bundle, BundledAdapter], FunctionStepModel]
SIZES = ["--nodes", "12", "--keep", "9", "--context", "96", "--chunk", "16"]
PACKAGES = {
    "bundle": [],
    "parts-2": ["--parts", "2", "--target", "coreml"],
    "parts-3": ["--parts", "3", "--target", "coreml"],
    "sampling": ["--sampling", "--target", "coreml", "--no-golden"],
}
# Keys and values as a state and as inputs, in one asset and in several; the first has both adapters.
ASSETS = {
    "coreai": ["--target", "coreai", "--adapter", "other"],
    "coreai-inputs": ["--target", "coreai", "--coreai-cache", "inputs"],
    "coreai-parts-2": ["--target", "coreai", "--parts", "2"],
    "coreai-inputs-parts-3": ["--target", "coreai", "--coreai-cache", "inputs", "--parts", "3"],
    "coreai-sampling": ["--target", "coreai", "--sampling", "--no-golden"],
}


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

    Then the same model divided into two and three packages, which must give the same answers, a package
    that returns its logits, with what is drawn from those, and Core AI assets where those can be made.
    """
    config = SpeculativeConfig(
        num_streams=3, num_msa_layers=2, stream_mlp="base", bigram_rank=4, bigram_shared=True
    )
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder)
        base = make_tiny_base(models / "base" / "tiny-base", dtype="float16")
        rows = [{"prompt": text} for text in ("SELECT a", "the prompt, again and again")]
        other = SpeculativeConfig(num_streams=2, num_msa_layers=1)
        for seed, (app, own) in enumerate({"tiny": config, "other": other}.items(), start=1):
            adapter = models / "adapters" / app
            save_adapter(random_adapter(base, own, seed, app), base.architecture, adapter)
            (adapter / "golden_prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        for name, more in (PACKAGES | (ASSETS if is_installed() else {})).items():
            words = ["--adapter", "tiny", "--models", models, "--output", target / name, *SIZES, *more]
            if status := ss_convert([*map(str, words)]):
                sys.exit(status)
    record(target)
    answers = python_answers(target / "bundle")
    for name in ("parts-2", "parts-3"):
        if python_answers(target / name) != answers:
            sys.exit(f"{name} does not answer as the model in one package does")
    write_sampled(target / "sampling", open_executor_model, target / "sampled.json")
    if is_installed():
        write_coreai_answers(target)
    # Last: `make` takes it for the whole folder.
    (target / "answers.json").write_text(json.dumps(answers) + "\n")


def write_coreai_answers(target: Path) -> None:
    """What the Python step model answers on the assets, by adapter: the same on all of them."""
    answers = {app: python_answers(target / "coreai", app, open_coreai_model) for app in ("tiny", "other")}
    for name in ("coreai-inputs", "coreai-parts-2", "coreai-inputs-parts-3"):
        if python_answers(target / name, "tiny", open_coreai_model) != answers["tiny"]:
            sys.exit(f"{name} does not answer as the model with a state in one asset does")
    (target / "coreai-answers.json").write_text(json.dumps(answers) + "\n")
    write_sampled(target / "coreai-sampling", open_coreai_model, target / "coreai-sampled.json")


def write_sampled(folder: Path, open_model: Opener, file: Path) -> None:
    """What is drawn from a package or an asset that returns its logits."""
    bundle = open_bundle(folder)
    adapter = bundle.adapter()
    drafter = Drafter(12, bigram_bias=bundle.bigram_bias(adapter))
    file.write_text(json.dumps(sampled_answers(open_model(bundle, adapter), drafter)) + "\n")


def python_answers(
    folder: Path, app: str | None = None, open_model: Opener = open_executor_model
) -> list[dict]:
    """Prompts with the tokens, calls, trees and text that the Python step model gives on a bundle."""
    bundle = open_bundle(folder)
    tiny, tokenizer = bundle.adapter(app), load_tokenizer(bundle)
    model = open_model(bundle, tiny)
    answers = []
    for text in ("SELECT a", "a much longer prompt than one chunk of sixteen", "x"):
        prompt = tokenizer.encode(text)
        drafter = Drafter(tiny.num_nodes, bigram_bias=bundle.bigram_bias(tiny))
        steps = list(decode(model, drafter, prompt, 16, frozenset({2})))
        tokens = [int(token) for step in steps for token in step.tokens]
        trees = [[step.tree.tokens.tolist(), step.tree.parents.tolist()] for step in steps[1:]]
        answers.append(
            {
                "question": text,
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
