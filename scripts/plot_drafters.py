"""Table and plots of what `scripts/compare_drafters.py` measured.

python scripts/plot_drafters.py models/measurements/rows --output docs

Prints the comparison as Markdown; draws `layers.png` (N_s against metric and tokens per call),
`pruning.png` (top-k trees with and without pruning) and `rotation.png` (streams at one position, told apart
by embeddings or by turned values) into the output folder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from ss_device.old_names import adapter_entries  # noqa: E402

APPS = ("sqlctx", "e2e_nlg", "dialogsum")
LABELS = {
    "lora": "plain LoRA",
    "shared": "SS-shared v1",
    "shared-v2": "SS-shared v2",
    "paper": "lossless, papers' settings",
    "bigram-bias": "+ bigram bias",
    "stream-lora": "+ stream LoRA",
    "self-distilled": "+ self-distillation",
    "self-distilled-8": "the same with γ 8",
}
METRICS = ("exact_match", "rouge1")
LAYERS = {"shared": {2: "shared-layers-2", 4: "shared", 6: "shared-layers-6", 8: "shared-layers-8"},
          "SS+": {2: "layers-2", 4: "self-distilled", 6: "layers-6", 8: "layers-8"}}  # fmt: skip
ABLATION_APP = "e2e_nlg"
KINDS = {"embeddings": "", "turned, ε π/2N": "-rotated", "turned, ε 0.39": "-rotated-beyond"}
ROTATIONS = {
    title: {label: f"{row}{ending}" for label, ending in KINDS.items()}
    for title, row in (
        ("shared mode", "shared-same"),
        ("lossless, papers' settings", "paper-same"),
        ("lossless, papers' settings, five epochs", "paper-same-long"),
        ("SS+", "same"),
    )
}
DRAWN = ("shared mode", "lossless, papers' settings, five epochs", "SS+")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder with <app>/<row>.json")
    parser.add_argument("--output", type=Path, required=True, help="folder for the plots")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for app in APPS:
        print_rows(app, arguments.folder / app)
    print_rotations(arguments.folder)
    ablations = arguments.folder / ABLATION_APP
    save(draw_layers(ablations), arguments.output / "layers.png")
    save(draw_pruning(ablations), arguments.output / "pruning.png")
    save(draw_rotation(arguments.folder), arguments.output / "rotation.png")


def print_rows(app: str, folder: Path) -> None:
    """Markdown: one line per row of the comparison that has been measured."""
    print(f"\n**{app}**\n")
    print("| row | metric (95 % interval) | k-ary 121 | best-first 32 | + lookup | by depth | parameters |")
    print("|---|---|---|---|---|---|---|")
    for row, label in LABELS.items():
        path = folder / f"{row}.json"
        if path.exists():
            print(table_line(label, adapter_entries(json.loads(path.read_text()))))


def print_rotations(folder: Path) -> None:
    """Markdown: streams at one position, told apart by embeddings or by turned values."""
    print("\n| mode | told apart by | " + " | ".join(APPS) + " |\n|---|---|" + "---|" * len(APPS))
    for title, rows in ROTATIONS.items():
        for label, row in rows.items():
            results = [json.loads((folder / app / f"{row}.json").read_text()) for app in APPS]
            cells = [f"{tokens_cell(r, 'best-first:32')}, {tokens_cell(r, 'chain:5')}" for r in results]
            print(f"| {title} | {label} | " + " | ".join(cells) + " |")


def table_line(label: str, result: dict) -> str:
    name, value, (low, high) = metric_of(result)
    cells = [label, f"{name} {value:.3f} ({low:.3f} to {high:.3f})"]
    cells += [tokens_cell(result, tree) for tree in ("k-ary:121", "best-first:32", "best-first+lookup:32")]
    best = tree_of(result, "best-first:32")
    cells.append(" / ".join(f"{a:.2f}" for a in best["acceptance_by_depth"][:8]) if best else "–")
    counts = result.get("parameters", {})
    cells.append(", ".join(f"{part} {count:,}" for part, count in counts.items() if count) or "–")
    return "| " + " | ".join(cells) + " |"


def metric_of(result: dict) -> tuple[str, float, list[float]]:
    """Name, value and 95 % interval of a result's first metric."""
    name = next(m for m in METRICS if m in result)
    return name, result[name], result[f"{name}_interval"]


def tree_of(result: dict, tree: str) -> dict | None:
    """One tree's counts; `evaluate` has one tree (best-first:32 here), `replay` several."""
    if "trees" in result:
        return result["trees"].get(tree)
    return result if "tokens_per_call" in result and tree == "best-first:32" else None


def tokens_cell(result: dict, tree: str) -> str:
    counts = tree_of(result, tree)
    if not counts:
        return "–"
    without = counts.get("without_repetition")
    return f"{counts['tokens_per_call']:.2f}" + (f" ({without['tokens_per_call']:.2f})" if without else "")


def draw_layers(folder: Path):
    """N_s against tokens per call (left) and, in shared mode, against the metric with its interval."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    for name, files in LAYERS.items():
        results = {n: json.loads((folder / f"{file}.json").read_text()) for n, file in files.items()}
        tokens = [tree_of(r, "best-first:32")["tokens_per_call"] for r in results.values()]
        left.plot(list(results), tokens, marker="o", label=name)
        if name == "shared":
            metrics = {n: metric_of(r) for n, r in results.items()}
            values = [value for _, value, _ in metrics.values()]
            spread = [[v - low, high - v] for _, v, (low, high) in metrics.values()]
            right.errorbar(list(metrics), values, list(zip(*spread, strict=True)), marker="o", capsize=3)
    left.set(xlabel="MSA layers N_s", ylabel="tokens per call, best-first 32")
    right.set(xlabel="MSA layers N_s", ylabel="ROUGE-1 (95 % interval), shared mode", ylim=(0, None))
    left.legend()
    return figure


def draw_pruning(folder: Path):
    """Rows above the pruning layer against tokens per call, one line per k."""
    figure, axis = plt.subplots(figsize=(6, 4))
    for k in (1, 2, 3):
        results = [json.loads(path.read_text()) for path in folder.glob(f"pruning-{k}-*.json")]
        points = sorted((r["rows_per_call"], r["tokens_per_call"]) for r in results)
        axis.plot(*zip(*points, strict=True), marker="o", label=f"k = {k}")
        axis.annotate("all", points[-1], textcoords="offset points", xytext=(0, 6), ha="center", fontsize=8)
    axis.set(xscale="log", xlabel="rows per call after pruning", ylabel="tokens per call")
    axis.legend()
    return figure


def draw_rotation(folder: Path):
    """Tokens per call of streams that nothing but embeddings, or turned values, tell apart."""
    figure, panels = plt.subplots(1, 3, figsize=(14, 3.6))
    for axis, title in zip(panels, DRAWN, strict=True):
        for index, (label, row) in enumerate(ROTATIONS[title].items()):
            results = [json.loads((folder / app / f"{row}.json").read_text()) for app in APPS]
            values = [tree_of(r, "chain:5")["tokens_per_call"] for r in results]
            bars = axis.bar([p + (index - 1) * 0.28 for p in range(len(APPS))], values, 0.26, label=label)
            axis.bar_label(bars, fmt="%.2f", fontsize=8)
        axis.set_xticks(range(len(APPS)), APPS)
        axis.set(title=title, ylabel="tokens per call, chain of 5", ylim=(1, None))
    panels[0].legend(fontsize=8)
    return figure


def save(figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
