"""The demo behind `make demo`: convert an adapter, answer questions, check that the back ends agree.

python -m scripts.demo
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from rich.text import Text

from scripts.demo_timing import side_by_side
from ss_device.application import applications_folder
from ss_device.bundle import MANIFEST, Bundle, BundledAdapter, open_bundle
from ss_device.command_line import CommandParser, console, positive, prompts_from_file, run_command
from ss_device.decoding import Drafter
from ss_runtime.backends import default_backend, open_backend
from ss_runtime.commands import validate
from ss_runtime.commands.generate import Session, run_prompt
from ss_runtime.settings import RuntimeSettings, default_dtype
from ss_runtime.tokenization import load_tokenizer

# The asset in float32 alone: the wheel's runtime takes half a second for a call.
REPLAYED = ("mlx:float32", "executor:float32", "executor:float16", "coreai:float32")
TUNING_QUESTIONS = 20
"""At most so many of the other questions decide which draft is the fastest."""


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code (1: a check of the tour failed)."""
    parser = CommandParser(
        prog="demo",
        description="Convert the adapter to Core ML, MLX and, where it is installed, Core AI; answer "
        "questions drawn step by step, run one on the Core ML package and one on the Core AI asset, time "
        "them with drafts and without, replay the golden traces.",
        example="python -m scripts.demo --questions 5",
    )
    parser.add_argument("--adapter", default="sqlctx", metavar="NAME")
    parser.add_argument("--input", type=Path, metavar="FILE", help="default: apps/<adapter>/demo.jsonl")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: build/<adapter>")
    parser.add_argument("--questions", type=positive, default=3, metavar="N")
    return run_command(parser, tour, argv)


def tour(arguments: argparse.Namespace) -> int:
    """Body of the command."""
    started = time.perf_counter()
    output = arguments.output or Path("build") / arguments.adapter
    _heading(f"1. ss-convert --adapter {arguments.adapter}: base and adapter become one bundle")
    if status := _convert(arguments.adapter, output):
        return status
    bundle = open_bundle(output)
    adapter = bundle.adapter(arguments.adapter)
    file = arguments.input or applications_folder() / arguments.adapter / "demo.jsonl"
    rows = prompts_from_file(file, adapter.prompt, arguments.questions)
    name = default_backend(bundle, adapter)
    _heading(f"2. {len(rows)} questions on {name}, one line per model call")
    first = _answer(bundle, adapter, rows, name)
    others = {"executor": "the Core ML package, run by the reference executor"}
    if adapter.coreai:
        others["coreai"] = "the Core AI asset, run by Apple's own runtime"
    for number, (other, what) in enumerate(others.items(), 3):
        _heading(f"{number}. the first question on {what}")
        same = _answer(bundle, adapter, rows[:1], other) == first[:1]
        print(f"the same tokens as {name}'s: {'yes' if same else 'NO'}")
    number = len(others) + 3
    if name == "mlx":
        _heading(f"{number}. the same questions without drafts and with those that suit this machine best")
        tuning = prompts_from_file(file, adapter.prompt, arguments.questions + TUNING_QUESTIONS)
        tuning = tuning[arguments.questions :] or rows
        if not side_by_side(bundle, adapter, rows, tuning):
            return 1
    _heading(f"{number + 1}. ss-validate: every back end replays what the PyTorch reference recorded")
    replayed = REPLAYED if adapter.coreai else REPLAYED[:-1]
    status = validate.main([str(output), *(word for name in replayed for word in ("--backend", name))])
    print(f"\ndemo done in {time.perf_counter() - started:.0f} s")
    # Half precision may settle a near tie otherwise; ss-validate judges that, not this comparison.
    return status


def _heading(text: str) -> None:
    console().print(Text(f"\n{text}", "bold cyan"), soft_wrap=True)
    sys.stdout.flush()


def _convert(adapter: str, output: Path) -> int:
    """Convert unless the bundle is up to date; the demo's own bundle may be replaced."""
    from ss_convert.command import main as convert
    from ss_convert.conversion import existing_bundle
    from ss_convert.planning import plan_conversion
    from ss_convert.settings import DEFAULT_TARGETS, ConversionSettings

    targets = (*DEFAULT_TARGETS, "coreai") if find_spec("coreai") else DEFAULT_TARGETS
    words = ["--adapter", adapter, "--target", ",".join(targets), "--output", str(output)]
    settings = ConversionSettings(adapters=(adapter,), targets=targets, output=output)
    stale = (output / MANIFEST).is_file()
    if stale and existing_bundle(plan_conversion(settings)):
        stale = False
    return convert([*words, *(["--force"] if stale else [])])


def _answer(
    bundle: Bundle, adapter: BundledAdapter, rows: list[tuple[dict, str]], name: str
) -> list[tuple[int, ...]]:
    """Answer the rows' prompts, drawn step by step; their token ids."""
    tokenizer = load_tokenizer(bundle)
    dtype = "float32" if name in ("executor", "coreai") else default_dtype(name)
    session = Session(
        model=open_backend(bundle, adapter, RuntimeSettings(name, dtype)),
        drafter=Drafter(adapter.num_nodes, bigram_bias=bundle.bigram_bias(adapter)),
        tokenizer=tokenizer,
        adapter=adapter,
        stop_ids=frozenset(bundle.manifest.architecture.eos_ids),
        max_tokens=adapter.max_tokens,
    )
    answers = []
    for row, prompt in rows:
        console().print(Text(f"\n{prompt.rstrip()}", "italic"), soft_wrap=True)
        _, result = run_prompt(session, tokenizer.encode(prompt), show_steps=True)
        console().print(Text(f"answer: {result.text.strip()}"), soft_wrap=True)
        if "answer" in row:
            verdict = "equal" if result.text.strip() == row["answer"].strip() else "differs"
            console().print(Text(f"data's:  {row['answer']}  ({verdict})"), soft_wrap=True)
        answers.append(result.token_ids)
    return answers


if __name__ == "__main__":
    sys.exit(main())
