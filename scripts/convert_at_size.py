"""Convert a base of a real model's size with random weights; state time, memory and one step's agreement.

    python -m scripts.convert_at_size llama-3.2-1b build/sizes
    python -m scripts.convert_at_size opt-1.3b build/sizes

Writes `<folder>/<name>/base` (float16, shards of at most 1 GB), an adapter at the papers' settings and the
bundle. Every part runs in a process of its own, whose time and largest memory are stated: ss-convert to MLX
alone, to both targets, to Core AI, then a prefill and one step of the package on the executor in float32,
and the same on the reference. What is finished is not done again; figures go to
`<folder>/<name>/figures.json` too.
Needs about 20 GB of disk and 11 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from ss_convert.command import main as ss_convert
from ss_device.adapter import load_adapter, save_adapter
from ss_device.base_model import open_base
from ss_device.bundle import open_bundle
from ss_device.config import paper_config
from ss_device.step_model import StepModel
from ss_device.tree import tree_from_parents

SHAPES = {
    "llama-3.2-1b": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "opt-1.3b": (
        "opt",
        {
            "vocab_size": 50272,
            "hidden_size": 2048,
            "word_embed_proj_dim": 2048,
            "ffn_dim": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
        },
    ),
    # For a look at this script itself.
    "tiny": ("opt", {"vocab_size": 300, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48,
                     "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 512}),
}  # fmt: skip
SIZES = ["--nodes", "16", "--context", "256", "--chunk", "32"]
PROMPT, NODES = 12, [-1, 0, 0, 1, 1, 2, 3, 3]
TARGETS = ("mlx", "both", "coreai")
BACK_ENDS = ("executor", "reference")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=("base", *TARGETS, *BACK_ENDS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.folder / arguments.shape
    if arguments.only == "base":
        write_base(arguments.shape, folder / "base")
    elif arguments.only in TARGETS:
        return convert(folder, arguments.only)
    elif arguments.only:
        take_one_step(folder, arguments.only)
    else:
        figures = measure(arguments.shape, arguments.folder)
        (folder / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
        print(json.dumps(figures, indent=1))
    return 0


def measure(shape: str, folder: Path) -> dict:
    """Every part in a process of its own, one after the other; what each took, and the comparison."""

    def part(name: str) -> dict:
        return run(["scripts.convert_at_size", shape, str(folder), "--only", name])

    own = folder / shape
    if not (own / "adapter").is_dir():
        part("base")
    conversions = {f"ss-convert --target {target}": part(target) for target in TARGETS}
    shards = [file.stat().st_size for file in (own / "base").glob("*.safetensors")]
    files = [file.stat().st_size for file in (own / "both").rglob("*") if file.is_file()]
    replays = {name: part(name) for name in BACK_ENDS}
    return {
        "parameters": open_base(own / "base").architecture.num_parameters(),
        "largest shard": max(shards),
        "written": sum(files),
        "largest file": max(files),
        **conversions,
        **replays,
        "agreement": agreement(own),
    }


def run(arguments: list[str]) -> dict:
    """Run a module; seconds by the clock and of processor time, largest memory in bytes."""
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", *arguments], stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(arguments)}: failed")
    return {
        "seconds": round(time.monotonic() - started, 1),
        "processor seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak memory": usage.ru_maxrss * 1024,
    }


def write_base(shape: str, folder: Path) -> None:
    """Random float16 weights in Hugging Face's layout with a byte-level tokenizer, an adapter beside."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.tiny_models import random_adapter, write_byte_tokenizer

    model_type, settings = SHAPES[shape]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float16)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder, max_shard_size="1GB")
    write_byte_tokenizer(folder)
    base = open_base(folder)
    adapter = random_adapter(base, paper_config(num_msa_layers=4))
    save_adapter(adapter, base.architecture, folder.parent / "adapter")


def convert(folder: Path, target: str) -> int:
    """ss-convert without golden traces (they would load the reference as well), to `<folder>/<target>`."""
    arguments = ["--adapter", folder / "adapter", "--base", folder / "base", "--output", folder / target]
    return ss_convert([*map(str, arguments), *SIZES, "--target", target, "--no-golden", "--json"])


def take_one_step(folder: Path, back_end: str) -> None:
    """A prefill and one tree on a back end in float32, into `<back end>.npz`.

    Base and adapter hold float16 values, so that package and reference compute with the same weights.
    """
    rng = np.random.default_rng(0)
    prompt, tokens = rng.integers(3, 259, PROMPT).tolist(), rng.integers(3, 259, len(NODES)).tolist()
    model = open_executor(folder) if back_end == "executor" else open_reference(folder)
    model.prefill(prompt)
    verified = model.step(tree_from_parents(tokens, NODES))
    logits = {} if verified.logits is None else {"logits": verified.logits}
    np.savez(
        folder / f"{back_end}.npz",
        chosen=verified.chosen,
        accepted=verified.accepted_node,
        streams=verified.stream_logits,
        **logits,
    )


def open_executor(folder: Path) -> StepModel:
    """The bundle's package in float32."""
    from ss_runtime.coreml.engines import open_executor_model

    bundle = open_bundle(folder / "both")
    return open_executor_model(bundle, bundle.adapter(), "float32")


def open_reference(folder: Path) -> StepModel:
    """Hugging Face's own layers in float32."""
    from ss_device.reference.step_model import ReferenceStepModel
    from ss_device.reference.stream_model import load_stream_model

    model = load_stream_model(open_base(folder / "base"), load_adapter(folder / "adapter"))
    return ReferenceStepModel(model, 16, 16, 256)


def agreement(folder: Path) -> dict:
    """How far the executor's step is from the reference's, relative to the largest logit."""
    ours, theirs = (np.load(folder / f"{name}.npz") for name in BACK_ENDS)
    top = np.partition(theirs["logits"], -2, axis=-1)[:, -2:]
    largest = np.abs(theirs["streams"]).max()
    return {
        "chosen tokens equal": bool(np.array_equal(ours["chosen"], theirs["chosen"])),
        "accepted node equal": bool(ours["accepted"] == theirs["accepted"]),
        "smallest margin of a chosen token": float((top[:, 1] - top[:, 0]).min()),
        "stream logits, relative difference": float(
            np.abs(ours["streams"] - theirs["streams"]).max() / largest
        ),
    }


if __name__ == "__main__":
    sys.exit(main())
