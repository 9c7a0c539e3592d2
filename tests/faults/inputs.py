"""What the commands under test read: tiny models, rows, a bundle, trained things. Made once."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ss_device.config import SpeculativeConfig
from tests.faults.processes import run

REPOSITORY = Path(__file__).resolve().parents[2]
APP = str(REPOSITORY / "apps" / "sqlctx")
CONFIG = SpeculativeConfig(num_streams=2, num_msa_layers=1, markov_rank=2)
SETTINGS = json.dumps({"num_streams": 2, "num_msa_layers": 1, "stream_mlp": "base", "markov_rank": 2})
SIZES = ("--nodes", "3", "--context", "48", "--chunk", "8")
RECIPE = """
name = "tiny"
seed = 3
[tokenizer]
vocab_size = 300
sample_documents = 10
[model]
hidden_size = 16
intermediate_size = 16
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
max_position_embeddings = 128
[training]
steps = 4
tokens_per_batch = 256
max_length = 96
learning_rate = 1e-2
warmup_steps = 2
weight_decay = 0.1
[[sources]]
kind = "application"
app = "sqlctx"
path = "rows.jsonl"
weight = 1.0
"""


def make_inputs(folder: Path) -> Path:
    """Fill `folder` (once: a folder that is there is taken as it is)."""
    if not (folder / "made").exists():
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["SS_APPS"] = str(REPOSITORY / "apps")
        for step in (_models, _texts, _bundle, _adapter):
            finished = run(lambda step=step: step(folder), folder)
            if finished.status:
                raise RuntimeError(f"{step.__name__}: {finished.err}")
        (folder / "made").touch()
    return folder


def _models(folder: Path) -> None:
    """A base of two layers, adapters `one` and `two`, rows of an application, prompts, a recipe."""
    from ss_device.adapter import save_adapter
    from tests.tiny_models import make_tiny_base, random_adapter

    base = make_tiny_base(
        folder / "models" / "base" / "tiny-base", dtype="float16", num_hidden_layers=2, hidden_size=16,
        intermediate_size=24, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    for seed, app in enumerate(("one", "two")):
        adapter = random_adapter(base, CONFIG, seed=seed, app=app)
        save_adapter(adapter, base.architecture, folder / "models" / "adapters" / app)
    rows = [{"question": f"q{i}?", "context": "CREATE TABLE t", "answer": f"SELECT {i}"} for i in range(12)]
    for name in ("rows.jsonl", "data/rows.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "prompts.jsonl").write_text('{"prompt": "SELECT a"}\n')
    (folder / "recipe.toml").write_text(RECIPE)


def _texts(folder: Path) -> int:
    from ss_device.training.command import main

    return main(["distill", APP, "--base", str(folder / "models/base/tiny-base"), "--data",
                 str(folder / "rows.jsonl"), "--output", str(folder / "own.jsonl"), "--max-tokens", "6"])  # fmt: skip


def _bundle(folder: Path) -> int:
    """`bundle` with adapter `one` for both targets, `mlx_bundle` without Core ML."""
    from ss_convert.command import main

    arguments = ["--adapter", "one", "--models", str(folder / "models"), *SIZES, "--no-golden"]
    return main([*arguments, "--output", str(folder / "bundle")]) or main(
        [*arguments, "--output", str(folder / "mlx_bundle"), "--target", "mlx"]
    )


def _adapter(folder: Path) -> int:
    from ss_device.training.command import main

    return main(["adapter", APP, "--base", str(folder / "models/base/tiny-base"), "--data",
                 str(folder / "own.jsonl"), "--settings", SETTINGS, "--output", str(folder / "adapter"),
                 "--epochs", "1", "--tokens-per-batch", "256"])  # fmt: skip
