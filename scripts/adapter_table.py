"""Tables of what adapters do, from the JSON files that `ss-train replay` and `ss-train evaluate` wrote.

python scripts/adapter_table.py models/measurements

A file is `<app>/<adapter>.json`. Prints Markdown: tokens per call and acceptance of every tree, the metric,
and the parameters by part.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ss_device.old_names import adapter_entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder with <app>/<adapter>.json")
    folder = parser.parse_args().folder
    results = [
        (path, adapter_entries(json.loads(path.read_text()))) for path in sorted(folder.glob("*/*.json"))
    ]
    print(
        "| application | adapter | tree | rows | tokens per call | 10 / 50 / 90 % | acceptance by depth |"
    )
    print("|---|---|---|---|---|---|---|")
    for path, result in results:
        for tree, summary in trees_of(result).items():
            print(tree_row(path.parent.name, path.stem, tree, summary))
    print("\n| application | adapter | prompts | metric (95 % interval) |")
    print("|---|---|---|---|")
    for path, result in results:
        print(f"| {path.parent.name} | {path.stem} | {prompts_of(result)} | {metric_of(result)} |")
    print("\n| adapter | " + " | ".join(parts_of(results)) + " |")
    print("|---" * (1 + len(parts_of(results))) + "|")
    for path, result in results:
        counts = [f"{result['parameters'].get(p, 0):,}" for p in parts_of(results)]
        print(f"| {path.parent.name}/{path.stem} | " + " | ".join(counts) + " |")


def trees_of(result: dict) -> dict[str, dict]:
    """Tree → counts; `evaluate` writes one tree, `replay` several."""
    if "trees" in result:
        return result["trees"]
    tree = result["tree"]
    kept = f" → {tree['kept']}" if tree["kept"] < tree["nodes"] else ""
    return {f"{tree['shape']}:{tree['nodes']}{kept}": result}


def tree_row(app: str, adapter: str, tree: str, summary: dict) -> str:
    spread = " / ".join(f"{v:.2f}" for v in summary["tokens_per_call_p10_p50_p90"])
    depths = " / ".join(f"{v:.2f}" for v in summary["acceptance_by_depth"][:6])
    more = " …" if len(summary["acceptance_by_depth"]) > 6 else ""
    return (
        f"| {app} | {adapter} | {tree} | {summary['rows_per_call']:.0f} | "
        f"{summary['tokens_per_call']:.2f} | {spread} | {depths}{more} |"
    )


def prompts_of(result: dict) -> int:
    return next(iter(trees_of(result).values()))["prompts"]


def metric_of(result: dict) -> str:
    """`rouge1 0.41 (0.38 to 0.44), …` of every figure that has an interval."""
    names = [n.removesuffix("_interval") for n in result if n.endswith("_interval")]
    shown = []
    for name in names:
        low, high = result[f"{name}_interval"]
        shown.append(f"{name} {result[name]:.3f} ({low:.3f} to {high:.3f})")
    return ", ".join(shown)


def parts_of(results: list[tuple[Path, dict]]) -> list[str]:
    """Parts that any adapter has."""
    names = {n: None for _, result in results for n, count in result["parameters"].items() if count}
    return list(names)


if __name__ == "__main__":
    main()
