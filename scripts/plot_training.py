"""Draw the loss curves of the shipped models from their training logs.

python scripts/plot_training.py models/training_logs --output models/loss_curves.png
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLUMNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("logs", type=Path, help="folder with one .jsonl log per run")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    files = sorted(arguments.logs.glob("*.jsonl"))
    rows = -(-len(files) // COLUMNS)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(5 * COLUMNS, 3.6 * rows), squeeze=False)
    for axis, file in itertools.zip_longest(axes.flat, files):
        if file is None:
            axis.axis("off")
        else:
            draw(axis, file)
    figure.tight_layout()
    figure.savefig(arguments.output, dpi=110)


def draw(axis, file: Path) -> None:
    """One run: the smoothed loss, or its parts where the log has them."""
    records = [json.loads(line) for line in file.open()]
    steps = [r["step"] for r in records]
    curves = {"loss": [r["loss"] for r in records]} if "loss" in records[0] else {
        name: [r["parts"][name] for r in records] for name in records[0]["parts"]
    }  # fmt: skip
    for name, values in curves.items():
        axis.plot(steps, values, label=name, linewidth=1.2)
    axis.set_title(file.stem)
    axis.set_xlabel("optimizer step")
    axis.set_ylabel("cross-entropy (smoothed)")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


if __name__ == "__main__":
    main()
