"""Peak memory and speed of adapter training against sequence length: dense mask, plain pass, segments.

python scripts/segment_memory.py --output docs/segment_attention

Every point is a process of its own that trains a random model for one step on one document of the given
length, streams at every position, and reports how much its peak memory grew (resident memory on a CPU,
allocated memory on CUDA) and, from a second step, tokens per second. Writes a .json and a .png.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

GAMMA = 4
METHODS = {
    "dense (L(1+γ))² mask": ("naive", "lossless"),
    "plain": ("plain", "lossless"),
    "segments": ("segments", "lossless"),
    "plain, shared v2": ("plain", "shared"),
    "segments, shared v2": ("segments", "shared"),
}
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 32768,
}


def main() -> None:
    arguments = parse()
    if arguments.child:
        method, mode, length = arguments.child
        print(json.dumps(one_point(method, mode, int(length), arguments)))
        return
    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        write_base(Path(folder))
        for name, (method, mode) in METHODS.items():
            curves[name] = curve(name, method, mode, Path(folder), arguments)
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "device": device_name(arguments.device),
        "threads": arguments.threads,
        "model": SHAPE,
        "streams": GAMMA,
        "segment": arguments.segment,
        "curves": curves,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.with_suffix(".json").write_text(
        json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    )
    draw(result, arguments.output.with_suffix(".png"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("docs/segment_attention"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--segment", type=int, default=128)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--limit-gb", type=float, default=6.0, help="skip points expected above this")
    parser.add_argument("--limit-seconds", type=float, default=12.0, help="and those expected above this")
    parser.add_argument("--child", nargs=3, metavar=("METHOD", "MODE", "LENGTH"), help=argparse.SUPPRESS)
    parser.add_argument("--base", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def write_base(folder: Path) -> None:
    from tests.tiny_models import make_tiny_base

    make_tiny_base(folder, initializer_range=0.02, **SHAPE)


def curve(name: str, method: str, mode: str, base: Path, arguments: argparse.Namespace) -> list[dict]:
    """Points of one method, until the next would pass a limit (both grow at most with the square)."""
    points: list[dict] = []
    for length in arguments.lengths:
        if points:
            growth = (length / points[-1]["length"]) ** 2
            expected = points[-1]["peak_bytes"] * growth
            duration = points[-1]["seconds"] * growth
            if expected > 1e9 * arguments.limit_gb or duration > arguments.limit_seconds:
                print(f"{name}, length {length}: skipped", file=sys.stderr)
                break
        command = [
            sys.executable, __file__, "--child", method, mode, str(length), "--base", str(base),
            "--segment", str(arguments.segment), "--device", arguments.device,
            "--threads", str(arguments.threads),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        points.append(json.loads(done.stdout))
        print(name, points[-1], file=sys.stderr, flush=True)
    return points


def one_point(method: str, mode: str, length: int, arguments: argparse.Namespace) -> dict:
    """Memory of the first step and speed of the second, in this process."""
    import torch

    torch.set_num_threads(arguments.threads)
    step = prepared_step(method, mode, length, arguments)
    cuda = arguments.device == "cuda"
    before = memory(cuda)
    loss = step()
    grown = memory(cuda) - before
    started = time.perf_counter()
    step()
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return {
        "length": length,
        "peak_bytes": grown,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(length / seconds, 1),
        "loss": loss,
    }


def prepared_step(method: str, mode: str, length: int, arguments: argparse.Namespace):
    """A function that runs forward and backward once and returns the loss of the first stream."""
    import numpy as np
    import torch
    from accelerate import Accelerator

    from ss_device.base_model import open_base
    from ss_device.config import paper_config
    from ss_device.training.adapt import build_stream_model
    from ss_device.training.corpus import Document
    from ss_device.training.loop import batch_gradients
    from ss_device.training.losses import make_batch
    from ss_device.training.objective import StreamLoss
    from ss_device.training.segments import stream_spans
    from tests.ss_device.naive_mask import naive_loss

    shared = mode == "shared"
    config = paper_config(mode, main_attends_streams=shared, num_streams=GAMMA)
    model = build_stream_model(open_base(arguments.base), config, 0).to(arguments.device)
    ids = np.random.default_rng(0).integers(3, SHAPE["vocab_size"], length).astype(np.int32)
    if method == "naive":
        tokens = torch.from_numpy(ids).long().to(arguments.device)

        def naive_step() -> float:
            streams, _, early = naive_loss(model, tokens, 1)
            (streams.sum() + early).backward()
            model.zero_grad()
            return round(float(streams[0]), 5)

        return naive_step
    documents = [Document(ids, 1)]
    objective = StreamLoss(model)
    accelerator = Accelerator(cpu=arguments.device == "cpu")
    batch = make_batch(documents, GAMMA).to(torch.device(arguments.device))
    size = arguments.segment if method == "segments" else 0
    spans = stream_spans(documents, size) if size else []

    def step() -> float:
        parts = batch_gradients(accelerator, objective, batch, size, spans, shared)
        model.zero_grad()
        return round(float(parts["stream_1"]), 5)

    return step


def memory(cuda: bool) -> int:
    """Peak bytes so far."""
    if cuda:
        import torch

        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_name(device: str) -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return names[0].partition(":")[2].strip() if names else "CPU"


def draw(result: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    for name, points in result["curves"].items():
        lengths = [p["length"] for p in points]
        style = "--" if "shared" in name else "-"
        left.plot(lengths, [p["peak_bytes"] / 1e6 for p in points], style, marker="o", label=name)
        right.plot(lengths, [p["tokens_per_second"] for p in points], style, marker="o", label=name)
    for axis, title in ((left, "peak memory of a step (MB)"), (right, "tokens per second")):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("sequence length, streams at every position")
        axis.set_title(title)
        axis.grid(alpha=0.3, which="both")
    left.legend(fontsize=8)
    figure.suptitle(f"γ {GAMMA}, segments of {result['segment']} positions, {result['device']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
