"""Convert a base of a real model's size with random weights; state time, memory and one step's agreement.

    python -m scripts.convert_at_size llama-3.2-1b build/sizes
    python -m scripts.convert_at_size opt-1.3b build/sizes

Writes `<folder>/<name>/base` (float16, shards of at most 1 GB), an adapter at the papers' settings and the
bundle; the conversion runs in a process of its own, whose largest memory is what is printed. Then the
package's prefill and first step run on the executor in float32 and are compared with the reference's.
Needs about 12 GB of disk and, for the comparison, 16 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from ss_convert.command import main as ss_convert
from ss_device.adapter import load_adapter, save_adapter
from ss_device.base_model import BaseFolder, open_base
from ss_device.bundle import open_bundle
from ss_device.config import paper_config
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--convert-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.folder / arguments.shape
    if arguments.convert_only:
        return convert(folder)
    base = write_base(arguments.shape, folder / "base")
    command = ["-m", "scripts.convert_at_size", arguments.shape, str(arguments.folder), "--convert-only"]
    subprocess.run([sys.executable, *command], check=True)
    shards = [file.stat().st_size for file in (folder / "base").glob("*.safetensors")]
    print(f"{base.architecture.num_parameters() / 1e9:.2f} G parameters, largest shard {gb(max(shards))}")
    print(json.dumps(first_step(base, folder)))
    return 0


def gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def write_base(shape: str, folder: Path) -> BaseFolder:
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
    return base


def convert(folder: Path) -> int:
    """ss-convert without golden traces (they would load the reference as well), timed."""
    started = time.monotonic()
    arguments = ["--adapter", folder / "adapter", "--base", folder / "base", "--output", folder / "bundle"]
    status = ss_convert([*map(str, arguments), *SIZES, "--no-golden"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    files = [file.stat().st_size for file in (folder / "bundle").rglob("*") if file.is_file()]
    written = f"{gb(sum(files))} written, the largest file {gb(max(files, default=0))}"
    print(f"ss-convert: {time.monotonic() - started:.0f} s, peak memory {gb(peak)}, {written}")
    return status


def first_step(base: BaseFolder, folder: Path) -> dict:
    """One prefill and one tree on the executor and the reference, both in float32."""
    from ss_device.reference.step_model import ReferenceStepModel
    from ss_device.reference.stream_model import load_stream_model
    from ss_runtime.coreml_model import open_executor_model

    bundle, outcomes = open_bundle(folder / "bundle"), []
    rng = np.random.default_rng(0)
    prompt, tokens = rng.integers(3, 259, 12).tolist(), rng.integers(3, 259, 8).tolist()
    tree = tree_from_parents(tokens, [-1, 0, 0, 1, 1, 2, 3, 3])
    for back_end in ("executor", "reference"):
        if back_end == "executor":
            model = open_executor_model(bundle, bundle.adapter(), "float32")
        else:
            adapter = load_adapter(folder / "adapter")
            model = ReferenceStepModel(load_stream_model(base, adapter), 16, 16, 256)
        model.prefill(prompt)
        outcomes.append(model.step(tree))
        del model
    ours, theirs = outcomes
    difference = (
        np.abs(ours.stream_logits - theirs.stream_logits).max() / np.abs(theirs.stream_logits).max()
    )
    return {
        "chosen tokens equal": bool(np.array_equal(ours.chosen, theirs.chosen)),
        "accepted node equal": ours.accepted == theirs.accepted,
        "stream logits, relative difference": float(difference),
    }


if __name__ == "__main__":
    sys.exit(main())
