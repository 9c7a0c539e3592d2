"""Write the measured tables of models/README.md, and the base's curve, from what was measured.

    python -m scripts.model_tables models

A table stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; what is between them is replaced.
Sources: `measurements/<app>/<adapter>.json` (ss-train replay), `measurements/data_counts.json`,
`measurements/checks.json` and `training_logs/<base>.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from ss_device.errors import UserError  # noqa: E402
from ss_device.old_names import adapter_entries  # noqa: E402

BASE = "ss-demo-base"
TREE_ROWS = (
    ("-paper", "papers' settings", ("k-ary:121", "chain:5", "best-first:32")),
    ("", "SS+", ("chain:9", "best-first:12", "best-first:32", "best-first:64",
                 "best-first+lookup:12", "best-first+lookup:32")),
)  # fmt: skip
TREE_NAMES = {
    "k-ary:121": "full k = 3 tree of 121 nodes",
    "chain:5": "chain of 5",
    "chain:9": "chain of 9",
    "best-first:12": "best-first 12",
    "best-first:32": "best-first 32",
    "best-first:64": "best-first 64",
    "best-first+lookup:12": "with prompt lookup, 12 nodes",
    "best-first+lookup:32": "with prompt lookup, 32 nodes",
}
FIGURES = (
    ("exact_match", "exact match"),
    ("any_case_match", "exact in any letter case"),
    ("skeleton_match", "exact with literals masked"),
    ("execution_match", "same result when executed"),
    ("rouge1", "ROUGE-1"),
    ("rouge2", "ROUGE-2"),
    ("rougeLsum", "ROUGE-Lsum"),
)
ORDER = ("sqlctx", "e2e_nlg", "dialogsum")
Results = dict[str, dict[str, dict]]
"""Application → adapter's suffix → what `ss-train replay --json` wrote."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, help="folder with README.md, measurements and training_logs")
    write_tables(parser.parse_args().models)


def write_tables(models: Path) -> None:
    """Replace every table of `models/README.md` and draw `models/base_curve.png`.

    Raises UserError where a marker is missing.
    """
    measured = models / "measurements"
    results = read_results(measured)
    checks = json.loads((measured / "checks.json").read_text())
    counts = json.loads((measured / "data_counts.json").read_text())
    log = [json.loads(line) for line in (models / "training_logs" / f"{BASE}.jsonl").open()]
    tables = {
        "data": data_table(counts),
        "metrics": metric_table(results),
        "trees": tree_table(results),
        "depths": depth_table(results),
        "parameters": parameter_table(results),
        "checks": check_table(checks),
        "curve": curve_table(log),
    }
    readme = models / "README.md"
    text = readme.read_text(encoding="utf-8")
    for name, lines in tables.items():
        text = replaced(text, name, lines, readme)
    readme.write_text(text, encoding="utf-8")
    front = models.parent / "README.md"
    if front.is_file() and "<!-- begin models -->" in front.read_text(encoding="utf-8"):
        shown = replaced(front.read_text(encoding="utf-8"), "models", summary_table(results), front)
        front.write_text(shown, encoding="utf-8")
    draw_curve(log, models / "base_curve.png")


def read_results(measured: Path) -> Results:
    """All replays, by application and the adapter's suffix."""
    results: Results = {}
    for path in sorted(measured.glob("*/*.json")):
        if path.stem.startswith(path.parent.name):
            suffix = path.stem.removeprefix(path.parent.name)
            results.setdefault(path.parent.name, {})[suffix] = adapter_entries(json.loads(path.read_text()))
    return {app: results[app] for app in (*ORDER, *sorted(results.keys() - set(ORDER))) if app in results}


def replaced(text: str, name: str, lines: Sequence[str], where: Path) -> str:
    """`text` with `lines` between the markers of `name`."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise UserError(f"{where}: expected '{begin}' and '{end}' once each")
    block = "\n".join([begin, *lines, end])
    return re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _: block, text, flags=re.S)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def data_table(counts: dict) -> list[str]:
    """Rows read, left out and changed, by application."""
    names = ("read", "excluded", "near_duplicates", "literals_rewritten", "written")
    heads = ("application", "rows", "left out by licence", "near-duplicates of held-out prompts",
             "SQL literals put into the question's letter case", "rows learnt")  # fmt: skip
    return table(heads, [[app, *(f"{c.get(n, 0):,}" for n in names)] for app, c in counts.items()])


def metric_table(results: Results) -> list[str]:
    """The base's metrics: lossless adapters cannot change them."""
    rows = []
    for name, title in FIGURES:
        cells = [_interval(found[""], name) for found in results.values()]
        if any(c != "–" for c in cells):
            rows.append([title, *cells])
    rows.append(["wrong or missing slots", *(_slots(f[""]) for f in results.values())])
    rows.append(["texts that repeat eight tokens", *(_looping(f[""]) for f in results.values())])
    rows.append(["prompts", *(str(_prompts(f[""])) for f in results.values())])
    return table(["", *results], rows)


def _interval(result: dict, name: str) -> str:
    if name not in result:
        return "–"
    low, high = result[f"{name}_interval"]
    return f"{result[name]:.3f} ({low:.3f} to {high:.3f})"


def _slots(result: dict) -> str:
    found = result.get("slot_errors")
    if not found or not found["slots"]:
        return "–"
    return f"{found['missing'] + found['wrong']} of {found['slots']} ({found['slot_error_rate']:.3f})"


def _prompts(result: dict) -> int:
    return next(iter(result["trees"].values()))["prompts"]


def _looping(result: dict) -> str:
    return f"{result['repeating_texts']} ({result['repeating_texts'] / _prompts(result):.3f})"


def tree_table(results: Results) -> list[str]:
    """Tokens per call by tree; in parentheses without texts that repeat themselves."""
    rows = []
    for suffix, title, trees in TREE_ROWS:
        for tree in trees:
            cells = []
            for found in results.values():
                summary = found.get(suffix, {"trees": {}})["trees"].get(tree)
                cells.append(_calls(summary) if summary else "–")
            rows.append([f"{title}, {TREE_NAMES[tree]}", *cells])
    return table(["tokens per call", *results], rows)


def _calls(summary: dict) -> str:
    plain = summary["without_repetition"]["tokens_per_call"]
    return f"{summary['tokens_per_call']:.2f} ({plain:.2f})"


def summary_table(results: Results) -> list[str]:
    """The short table of the repository's README."""
    rows = []
    for suffix, title, _ in TREE_ROWS:
        trees = ("best-first:32", "best-first+lookup:32") if not suffix else ("best-first:32",)
        parameters = sum(next(iter(results.values()))[suffix]["parameters"].values())
        for tree in trees:
            cells = [_calls(found[suffix]["trees"][tree]) for found in results.values()]
            rows.append([f"{title}, {TREE_NAMES[tree]}", f"{parameters:,}", *cells])
    return table(["tokens per call", "extra parameters", *results], rows)


def depth_table(results: Results) -> list[str]:
    """Acceptance by depth, given that the parent was accepted, with 32 nodes."""
    rows = []
    for suffix, title, _ in TREE_ROWS:
        for app, found in results.items():
            if suffix in found:
                depths = found[suffix]["trees"]["best-first:32"]["acceptance_by_depth"]
                rows.append([f"{app}, {title}", " / ".join(f"{d:.2f}" for d in depths)])
    return table(["best-first 32", "acceptance at depth 1, 2, …"], rows)


def parameter_table(results: Results) -> list[str]:
    """Extra parameters by part; the same for every application."""
    found = next(iter(results.values()))
    names = list(dict.fromkeys(n for r in found.values() for n, c in r["parameters"].items() if c))
    titles = {suffix: title for suffix, title, _ in TREE_ROWS}
    suffixes = [s for s in titles if s in found]
    rows = [
        [name.replace("_", " "), *(f"{found[s]['parameters'].get(name, 0):,}" for s in suffixes)]
        for name in names
    ]
    return table(["part", *(titles[s] for s in suffixes)], rows)


def check_table(checks: dict) -> list[str]:
    """Tokens per call as validation predicts them against decoding."""
    rows = [
        [name, f"{c['documents']} ({c['same_text']})", f"{c['predicted']:.3f}", f"{c['decoded']:.3f}",
         f"{100 * (c['decoded'] / c['predicted'] - 1):+.2f} %"]
        for name, c in checks.items()
    ]  # fmt: skip
    return table(
        ["adapter", "validation texts (decoded the same)", "predicted", "decoded", "difference"], rows
    )


def curve_table(log: Sequence[dict]) -> list[str]:
    """What the checks said while the base was trained."""
    records = [r for r in log if "valid" in r]
    apps = list(records[-1]["valid"]) if records else []
    rows = []
    for record in records:
        valid = [record["valid"][app] for app in apps]
        cells = [f"{_main_figure(v)[1]:.2f}, {v['looping']:.2f}" for v in valid]
        rows.append([f"{record['tokens'] / 1e6:.1f}", f"{record['lr']:.1e}", *cells])
    heads = [f"{a}: {_main_figure(records[-1]['valid'][a])[0]}, looping" for a in apps]
    return table(["million tokens", "rate", *heads], rows)


def _main_figure(valid: dict) -> tuple[str, float]:
    """Name and value of an application's first figure that says most."""
    return next((title, valid[name]) for name, title in _MAIN if name in valid)


_MAIN = (("any_case_match", "any case"), ("rouge1", "ROUGE-1"), ("exact_match", "exact"))


def draw_curve(log: Sequence[dict], output: Path) -> None:
    """Held-out loss, metric and looping share against tokens seen, one column per application."""
    records = [r for r in log if "valid" in r]
    if not records:
        return
    apps = list(records[-1]["valid"])
    figure, axes = plt.subplots(1, len(apps), figsize=(4.6 * len(apps), 3.4), squeeze=False)
    tokens = [r["tokens"] / 1e6 for r in records]
    for axis, app in zip(axes[0], apps, strict=True):
        title = _main_figure(records[-1]["valid"][app])[0]
        axis.plot(tokens, [_main_figure(r["valid"][app])[1] for r in records], "o-", label=title)
        axis.plot(tokens, [r["valid"][app]["looping"] for r in records], "s--", label="looping texts")
        axis.set_ylim(0, 1)
        axis.set_title(app)
        axis.set_xlabel("million tokens")
        losses = axis.twinx()
        losses.plot(tokens, [r["valid"][app]["loss"] for r in records], ":", color="gray")
        losses.set_ylabel("loss per generated token (dotted)")
        losses.set_ylim(bottom=0)
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(output, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
