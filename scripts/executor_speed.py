"""How fast the reference executor generates text with a model of 24 million parameters.

    python -m scripts.executor_speed build/speed
    python -m scripts.executor_speed build/speed --profile

Writes a random Llama (h 512, 8 layers, vocabulary 4096, tied head) and an SS+ adapter, converts them, and
generates with the package in float32 and float16: trees of `--nodes` nodes, then plain decoding
(one node, the same package). Nothing is trained, so no draft is accepted beyond chance: tokens per second
are the calls per second, what a trained adapter's tokens per call multiply. With OMP_NUM_THREADS=1 the
processor's time tells what a machine that does nothing else would take. `--profile` adds the time by
operation.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from ss_convert.command import main as ss_convert
from ss_device.adapter import save_adapter
from ss_device.base_model import BaseFolder
from ss_device.bundle import Bundle, open_bundle
from ss_device.config import SpeculativeConfig
from ss_device.decoding import Drafter, decode
from ss_executor.program import Program
from ss_runtime.coreml.engines import open_executor_model

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
CONFIG = SpeculativeConfig(stream_lora_rank=32, stream_lora_alpha=32.0, bigram_rank=32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a text")
    parser.add_argument("--texts", type=int, default=3, help="the fastest of so many counts")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    bundle = made_bundle(arguments.folder, arguments.nodes)
    print("| dtype | decoding | calls | tokens | tokens per second | ms per call | CPU ms |")
    print("|---|---|---|---|---|---|---|")
    for dtype in ("float32", "float16"):
        model = open_executor_model(bundle, bundle.adapter(), dtype)
        for nodes in (arguments.nodes, 1):
            spent = Counter()
            with profiled(spent, arguments.profile):
                tokens, calls, seconds, busy = fastest(model, nodes, arguments.tokens, arguments.texts)
            what = f"trees of {nodes}" if nodes > 1 else "plain"
            each = f"{1000 * seconds / calls:.0f} | {1000 * busy / calls:.0f}"
            print(f"| {dtype} | {what} | {calls} | {tokens} | {tokens / seconds:.2f} | {each} |")
            for name, share in spent.most_common(12):
                print(f"    {share:8.3f} s  {name}")
    return 0


def made_bundle(folder: Path, nodes: int) -> Bundle:
    """The converted random model, made once per number of nodes."""
    bundle, base = folder / f"bundle-{nodes}", folder / "base"
    if not (base / "config.json").is_file():
        made = write_base(base)
        print(f"{made.architecture.num_parameters():,} parameters", file=sys.stderr)
    options = ["--target", "coreml", "--no-golden", "--nodes", str(nodes), "--output", str(bundle)]
    if ss_convert(["--adapter", str(folder / "adapter"), "--base", str(base), *options]):
        sys.exit(2)
    return open_bundle(bundle)


def write_base(folder: Path) -> BaseFolder:
    from tests.tiny_models import make_tiny_base, random_adapter

    base = make_tiny_base(folder, dtype="float16", **{**SHAPE, "initializer_range": 0.05})
    save_adapter(random_adapter(base, CONFIG), base.architecture, folder.parent / "adapter")
    return base


def fastest(model, nodes: int, count: int, texts: int) -> tuple[int, int, float, float]:
    """Tokens, calls, seconds and processor seconds of decoding after the prompt, of the fastest text."""
    prompt = np.random.default_rng(0).integers(3, 4000, 48).tolist()
    found = []
    for _ in range(texts):
        steps = decode(model, Drafter(nodes), prompt, count, frozenset())
        next(steps)  # the prompt
        started, busy, done = time.perf_counter(), time.process_time(), list(steps)
        seconds, busy = time.perf_counter() - started, time.process_time() - busy
        found.append((sum(len(step.tokens) for step in done), len(done), seconds, busy))
    return min(found, key=lambda text: text[2])


class profiled:
    """Adds the seconds of every operation type to `spent` while it is entered."""

    def __init__(self, spent: Counter, wanted: bool) -> None:
        self._spent, self._wanted, self._original = spent, wanted, Program._run_step

    def __enter__(self) -> None:
        if self._wanted:
            original, spent = self._original, self._spent

            def timed(program, step, values):
                started = time.process_time()
                original(program, step, values)
                spent[step.call.type] += time.process_time() - started

            Program._run_step = timed

    def __exit__(self, *_) -> None:
        Program._run_step = self._original


if __name__ == "__main__":
    sys.exit(main())
