"""The demo's comparison: the same questions one token per call and with a tuned draft, in seconds."""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.table import Table

from ss_device.bundle import Bundle, BundledAdapter
from ss_device.command_line import console
from ss_device.decoding import Drafter
from ss_device.draft_choice import DraftChoice
from ss_runtime.backends import open_backend
from ss_runtime.commands import bench
from ss_runtime.generation import Result, generate
from ss_runtime.settings import RuntimeSettings, default_dtype
from ss_runtime.tokenization import load_tokenizer
from ss_runtime.tuning import AdaptiveChoice, read_tuning

ROUNDS = 3
"""Timed rounds after one to warm up; in every other one the drafts come first."""
WAYS = ("plain", "drafted")
Rows = list[tuple[dict, str]]


def side_by_side(bundle: Bundle, adapter: BundledAdapter, rows: Rows, others: Rows) -> bool:
    """Tune the draft on `others`, answer `rows` both ways in turn on MLX and print a table of seconds.

    Rows are (row, prompt text). Returns whether both ways gave the same tokens.
    """
    tune(bundle, adapter, [prompt for _, prompt in others])
    choice = read_tuning(bundle, adapter.app, default_dtype("mlx"))
    answers = open_ways(bundle, adapter, choice)
    table = Table("question", "tokens", *(f"{way} s" for way in WAYS), "model calls", "faster", box=None)
    same, totals = True, dict.fromkeys(WAYS, 0.0)
    for number, (_, prompt) in enumerate(rows, 1):
        results: dict[str, list[Result]] = {way: [] for way in WAYS}
        for turn in range(1 + ROUNDS):
            for way in sorted(WAYS, reverse=turn % 2 == 0):
                results[way].append(answers[way](prompt))
        seconds = {w: statistics.median(r.seconds["decode"] for r in results[w][1:]) for w in WAYS}
        plain, drafted = (results[way][-1] for way in WAYS)
        same = same and plain.token_ids == drafted.token_ids
        totals = {way: totals[way] + seconds[way] for way in WAYS}
        table.add_row(
            str(number),
            str(plain.generated_tokens),
            *(f"{seconds[way]:.3f}" for way in WAYS),
            f"{plain.steps} → {drafted.steps}",
            f"{seconds['plain'] / seconds['drafted']:.2f} ×",
        )
    console().print(table)
    print(f"draft: {choice.label()} (ss-bench tune on {len(others)} other questions)")
    print(f"decoding alone, medians of {ROUNDS} rounds; all questions: "
          f"{totals['plain'] / totals['drafted']:.2f} times as fast")  # fmt: skip
    print(f"the same tokens with drafts and without: {'yes' if same else 'NO'}")
    return same


def open_ways(
    bundle: Bundle, adapter: BundledAdapter, choice: DraftChoice | AdaptiveChoice
) -> dict[str, Callable[[str], Result]]:
    """Way → what answers a prompt's text. Drafts start every time from the experience of tuning."""
    tokenizer, bias = load_tokenizer(bundle), bundle.bigram_bias(adapter)
    stop_ids = frozenset(bundle.manifest.architecture.eos_ids)

    def way(new_drafter: Callable[[], Drafter]) -> Callable[[str], Result]:
        settings = RuntimeSettings(backend="mlx", num_kept=choice.num_kept or adapter.num_nodes)
        if new_drafter().num_nodes == 1:
            settings = settings.without_streams(adapter)
        model = open_backend(bundle, adapter, settings)
        return lambda prompt: generate(
            model, new_drafter(), tokenizer.encode(prompt), adapter.max_tokens, stop_ids,
            adapter.stop_strings, tokenizer,
        )  # fmt: skip

    return {"plain": way(lambda: Drafter(1)), "drafted": way(lambda: choice.drafter(bias))}


def tune(bundle: Bundle, adapter: BundledAdapter, prompts: list[str]) -> None:
    """`ss-bench tune` on these prompts, without its table."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        file = Path(scratch) / "prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        command = ["tune", str(bundle.path), "--adapter", adapter.app, "--input", str(file)]
        if code := bench.main(command):
            raise SystemExit(code)
