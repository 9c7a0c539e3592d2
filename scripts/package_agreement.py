"""Packages of every preset, weight format and family on the executor, against the reference.

    python -m scripts.package_agreement --output build/agreement.json
    python -m scripts.package_agreement --output build/agreement.json --demo

For each combination a package is written and the PyTorch reference, with the weights read back from that
package, decodes prompts with best-first trees; the executor replays them, in float32 and in float16.
Families are tiny random models; `--demo` adds the shipped base with `sqlctx` and its golden prompts. What
the output holds already is not done again. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from ss_convert.coreml.convert import write_package
from ss_convert.golden import read_prompts, record_traces
from ss_convert.graph.options import PRESETS, GraphOptions
from ss_convert.graph.weight_format import WEIGHT_FORMATS
from ss_convert.stored_weights import stored_weights
from ss_device.adapter import load_adapter
from ss_device.base_model import models_folder, open_base
from ss_device.config import SpeculativeConfig
from ss_executor import load_package
from ss_runtime.function_step_model import FunctionStepModel
from ss_runtime.validation import ReplayOutcome, replay_traces
from tests.families.tiny import make_base
from tests.tiny_models import random_adapter

FAMILIES = ("llama3", "opt", "phi", "mistral")
DEMO = "demo base"
TINY = SpeculativeConfig(num_streams=3, num_msa_layers=2, stream_lora_rank=2, stream_lora_alpha=4.0)
TINY_SIZES = {"num_nodes": 12, "num_kept": 8, "context": 64, "chunk": 16}
DEMO_SIZES = {"num_nodes": 32, "num_kept": 32, "context": 512, "chunk": 64}
COLUMNS = (
    "model", "preset", "weights", "prompts exact in float32", "nodes", "max. Δ logit",
    "prompts exact in float16", "differing nodes", "their largest margin", "max. Δ logit",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file of what is done")
    parser.add_argument("--demo", action="store_true", help="the demo base as well")
    parser.add_argument("--limit", type=int, default=2, help="prompts per combination")
    arguments = parser.parse_args()
    done = json.loads(arguments.output.read_text()) if arguments.output.is_file() else {}
    models = [*FAMILIES, DEMO] if arguments.demo else list(FAMILIES)
    for model in models:
        for key, rows in combinations(model, done, arguments.limit):
            done[key] = rows
            partial = arguments.output.with_suffix(".partial")
            partial.write_text(json.dumps(done, indent=1))
            partial.replace(arguments.output)
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|")
    for model in models:
        for preset in sorted(PRESETS):
            for weights in WEIGHT_FORMATS:
                print(
                    "| " + " | ".join([model, preset, weights, *cells(done, model, preset, weights)]) + " |"
                )
    return 0


def combinations(model: str, done: dict, limit: int):
    """Key and results of a model's combinations that are not done."""
    with tempfile.TemporaryDirectory() as name:
        case = None
        for preset in sorted(PRESETS):
            for weights in WEIGHT_FORMATS:
                key = f"{model}/{preset}/{weights}"
                if key in done:
                    continue
                case = case or opened(model, Path(name), limit)
                print(key, file=sys.stderr)
                yield key, agreement(*case, Path(name), preset, weights)


def opened(model: str, folder: Path, limit: int):
    """Base, adapter, prompts (text, ids) and sizes."""
    if model == DEMO:
        models = models_folder()
        adapter = load_adapter(models / "adapters" / "sqlctx")
        base = open_base(models / "base" / adapter.base.name)
        prompts = read_prompts(models / "adapters/sqlctx/golden_prompts.jsonl", adapter, base, 512)
        return base, adapter, prompts[:limit], DEMO_SIZES
    base = make_base(model, folder)
    rng = np.random.default_rng(0)
    prompts = [("", tuple(rng.integers(3, 259, 21).tolist())) for _ in range(limit)]
    return base, random_adapter(base, TINY), prompts, TINY_SIZES


def agreement(base, adapter, prompts, sizes: dict, folder: Path, preset: str, weights: str) -> dict:
    """Replays in both dtypes of one package."""
    embedding = "fp16" if weights == "fp16" else "int8"
    options = GraphOptions(**sizes, weights=weights, embedding_weights=embedding, **PRESETS[preset])
    path = folder / "package" / f"{preset}-{weights}.mlpackage"
    functions = write_package(base.architecture, base.weights(), adapter, options, path)
    dense = stored_weights(path, functions.step, base.weights(), base.architecture)
    traces, _ = record_traces(base, adapter, prompts, options, dense)
    package, found = load_package(path), {}
    for dtype in ("float32", "float16"):
        programs = [package.program(name, dtype) for name in (functions.prefill, functions.step)]
        model = FunctionStepModel(*programs, functions, adapter.config, base.architecture)
        found[dtype] = replay_traces(model, traces, ReplayOutcome("executor", dtype)).to_dict()
    return found


def cells(done: dict, model: str, preset: str, weights: str) -> list[str]:
    exact, half = (done[f"{model}/{preset}/{weights}"][a] for a in ("float32", "float16"))
    margins = [d["margin"] for d in half["differences"]]
    return [
        f"{exact['token_exact']} of {exact['prompts']}" + ("" if exact["passed"] else " FAILED"),
        str(exact["nodes"]),
        f"{exact['max_logit_difference']:.1e}",
        f"{half['token_exact']} of {half['prompts']}" + ("" if half["passed"] else " FAILED"),
        str(len(margins)),
        f"{max(margins):.2g}" if margins else "–",
        f"{half['max_logit_difference']:.2g}",
    ]


if __name__ == "__main__":
    sys.exit(main())
