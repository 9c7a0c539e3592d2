"""Tune and benchmark every adapter of a bundle on its own test prompts, and one on prompts that do not fit.

    python -m scripts.benchmark_applications build/apps --data DATA --base models/base/ss-demo-base

DATA holds <app>/valid.jsonl.gz and <app>/test.jsonl.gz for every adapter and prompts/mt_bench.jsonl.gz
(first turns are asked). From every file distinct prompts are drawn at random, with a fixed seed; those that
leave no room in the context for the answer are passed over. Tuning is by validation prompts alone. Writes
docs/benchmark_<app>.json, .md and .png, and the same for mt_bench. Close other programs first.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from ss_device.bundle import Bundle, open_bundle
from ss_device.json_lines import read_json_lines
from ss_runtime.commands.bench import main as ss_bench
from ss_runtime.tokenization import load_tokenizer

SEED = 0
METHODS = "plain,mlx-lm,prompt-lookup,ss-lookup,ss,ss-tuned"


class Prompts:
    """Writes rows with a `prompt` that fits, for `ss-bench --input`."""

    def __init__(self, bundle: Bundle, max_tokens: int, folder: Path) -> None:
        self._bundle, self._tokenizer, self._folder = bundle, load_tokenizer(bundle), folder
        self._room = bundle.manifest.architecture.default_context - max_tokens

    def write(self, name: str, texts: Iterable[str], limit: int) -> Path:
        """`limit` of the distinct texts of at most context − max tokens, drawn at random."""
        distinct = list(dict.fromkeys(texts))
        random.Random(SEED).shuffle(distinct)
        fitting = (text for text in distinct if len(self._tokenizer.encode(text)) <= self._room)
        target = self._folder / f"{name}.jsonl"
        target.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in islice(fitting, limit)))
        return target

    def of_app(self, app: str, source: Path, limit: int) -> Path:
        adapter = self._bundle.adapter(app)
        rows = read_json_lines(source)
        return self.write(f"{app}.{source.name}", (adapter.prompt(row) for row in rows), limit)


def run(*command: object) -> None:
    """One ss-bench command; its own message says what was wrong."""
    if code := ss_bench([str(part) for part in command]):
        raise SystemExit(code)


def measure(arguments: argparse.Namespace, app: str, prompts: Path, name: str) -> None:
    """One interleaved run of all methods."""
    methods = METHODS + (",mlx-lm-draft" if arguments.draft else "")
    output = arguments.output / f"benchmark_{name}.json"
    command = [
        "run",
        "--force",
        arguments.bundle,
        "--adapter",
        app,
        "--input",
        prompts,
        "--methods",
        methods,
    ]
    command += ["--base", arguments.base, "--max-tokens", arguments.max_tokens]
    command += ["--dtype", "float32", "--output", output, "--plot", output.with_suffix(".png")]
    print(f"\n## {name} ({app})\n", flush=True)
    if arguments.draft:
        command += ["--draft", arguments.draft, "--draft-tokens", arguments.draft_tokens]
    run(*command)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--draft", type=Path, help="a small model's folder, for mlx-lm's draft decoding")
    parser.add_argument("--draft-tokens", type=int, default=2, help="that it writes ahead")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--tune-limit", type=int, default=40)
    parser.add_argument("--misfit", default="sqlctx", help="the adapter that MT-Bench is asked with")
    parser.add_argument("--output", type=Path, default=Path("docs"))
    arguments = parser.parse_args()
    bundle = open_bundle(arguments.bundle)
    with tempfile.TemporaryDirectory() as scratch:
        prompts = Prompts(bundle, arguments.max_tokens, Path(scratch))
        for app in sorted(bundle.manifest.adapters):
            folder = arguments.data / app
            tuning = ["--input", prompts.of_app(app, folder / "valid.jsonl.gz", arguments.tune_limit)]
            print(f"\n## tuning {app}\n", flush=True)
            tuning += ["--max-tokens", arguments.max_tokens, "--dtype", "float32"]
            run("tune", arguments.bundle, "--adapter", app, *tuning)
            test = prompts.of_app(app, folder / "test.jsonl.gz", arguments.limit)
            measure(arguments, app, test, app)
        questions = read_json_lines(arguments.data / "prompts" / "mt_bench.jsonl.gz")
        turns = (row["turns"][0] + "\n" for row in questions)
        measure(arguments, arguments.misfit, prompts.write("mt_bench", turns, arguments.limit), "mt_bench")


if __name__ == "__main__":
    main()
