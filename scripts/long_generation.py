"""A generation of 10,000 tokens close to the context limit: memory, step time against position, growth.

    python -m scripts.long_generation --output runs/long_generation.json --plot runs/long_generation.png

A small Llama shape with random weights (nothing is downloaded, the text means nothing) and random stream
parts, with a context that prompt and answer fill. Every step draws a tree, so that a step costs what it
costs in use; random drafts are hardly ever accepted. Times are this process's CPU time, so that other
programs on the machine count little. Memory: resident size of the process, MLX's live arrays beside
weights and key/value buffers, MLX's cache of freed buffers.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from ss_device.architecture import Architecture
from ss_device.config import SpeculativeConfig, tensor_shapes
from ss_device.decoding import Drafter, decode
from ss_runtime.backends import load_openblas

CONFIG = SpeculativeConfig(num_streams=3, num_msa_layers=2, stream_adapter_rank=8, pruning_rank=0)


def small_architecture(context: int) -> Architecture:
    """Four layers of a Llama with grouped-query attention, `context` positions."""
    from ss_device.families import read_architecture

    return read_architecture(
        {
            "model_type": "llama",
            "vocab_size": 2048,
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
        }
    )


def open_random(context: int, nodes: int):
    """An MLX step model with random weights."""
    from ss_runtime.mlx.loading import fastest_stream_rows
    from ss_runtime.mlx.step_model import MLXStepModel
    from ss_runtime.settings import RuntimeSettings

    architecture, rng = small_architecture(context), np.random.default_rng(0)

    def arrays(shapes: dict) -> dict:
        return {
            name: np.ones(shape, np.float32)
            if name.endswith("norm.weight")
            else rng.normal(0, 1.5 * shape[-1] ** -0.5, shape).astype(np.float32)
            for name, shape in shapes.items()
        }

    return MLXStepModel(
        architecture,
        CONFIG,
        arrays(architecture.weight_shapes()),
        arrays(tensor_shapes(CONFIG, architecture)),
        RuntimeSettings(
            num_nodes=nodes,
            context=context,
            dtype="float32",
            stream_rows=fastest_stream_rows(CONFIG),
        ),
    )


def resident_bytes() -> int:
    """Resident size of this process (Linux)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def measure(model, nodes: int, prompt: list[int], tokens: int) -> list[dict]:
    """One row per call after the prompt's: position, CPU and wall milliseconds, buffer slots, bytes."""
    import mlx.core as mx

    rows, steps = [], decode(model, Drafter(nodes), prompt, tokens)
    position = len(prompt) + len(next(steps).tokens)
    while True:
        capacity, cpu, wall = model.cache.capacity, time.process_time(), time.perf_counter()
        step = next(steps, None)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        if step is None:
            return rows
        position += len(step.tokens)
        held = sum(array.nbytes for pair in model.cache.layers for array in pair)
        rows.append(
            {
                "position": position,
                "cpu_ms": 1000 * cpu,
                "wall_ms": 1000 * wall,
                "slots": model.cache.capacity,
                "grew": model.cache.capacity != capacity,
                "kv_bytes": held,
                "live_bytes": mx.get_active_memory() - held,
                "freed_bytes": mx.get_cache_memory(),
                "resident_bytes": resident_bytes(),
            }
        )


def summary(rows: list[dict], parts: int = 10) -> dict:
    """Medians by tenth of the text; the steps that grew the buffers against the ten steps around them."""
    cpu = np.array([row["cpu_ms"] for row in rows])
    table = []
    for part in np.array_split(np.arange(len(rows)), parts):
        last = rows[part[-1]]
        bytes_there = {name: last[name] for name in last if name.endswith("_bytes")}
        table.append(
            {
                "up_to_position": last["position"],
                "slots": last["slots"],
                "cpu_ms": {
                    "median": float(np.median(cpu[part])),
                    "p99": float(np.percentile(cpu[part], 99)),
                    "max": float(cpu[part].max()),
                },
                **bytes_there,
            }
        )
    grown = [index for index, row in enumerate(rows) if row["grew"] and 5 <= index < len(rows) - 5]
    around = [np.median(np.r_[cpu[i - 5 : i], cpu[i + 1 : i + 6]]) for i in grown]
    ratios = cpu[grown] / np.array(around)
    slots = np.array([row["slots"] for row in rows])
    slope, start = np.polyfit(slots, cpu, 1)
    return {
        "calls": len(rows),
        "tokens": rows[-1]["position"] - rows[0]["position"] + 1,
        "table": table,
        "growths": len(grown),
        "growth_over_neighbours": {"median": float(np.median(ratios)), "max": float(ratios.max())},
        "any_over_neighbours_max": float(_worst(cpu)),
        "cpu_ms_fit": {"at_no_slots": float(start), "per_1000_slots": float(1000 * slope)},
    }


def _worst(cpu: np.ndarray) -> float:
    """The slowest call against the median of the ten around it."""
    return max(
        cpu[i] / np.median(np.r_[cpu[i - 5 : i], cpu[i + 1 : i + 6]]) for i in range(5, len(cpu) - 5)
    )


def plot(rows: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.add_subplot()
    at = [row["position"] for row in rows]
    axes.plot(at, [row["cpu_ms"] for row in rows], ",", color="#1f77b4")
    axes.set(xlabel="position in tokens", ylabel="CPU time of a call, ms", ylim=(0, None))
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=10000, help="tokens to generate")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    load_openblas()
    context = arguments.prompt + arguments.tokens
    model = open_random(context, arguments.nodes)
    prompt = np.random.default_rng(1).integers(3, 2048, arguments.prompt).tolist()
    rows = measure(model, arguments.nodes, prompt, arguments.tokens)
    result = {"context": context, "nodes": arguments.nodes, **summary(rows)}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
