"""Compare a bundle's back ends with Hugging Face `generate` on the untouched base, token for token.

    python scripts/compare_with_huggingface.py build/sqlctx --base models/base/ss-demo-base \
        --input test.jsonl --limit 50 mlx:float32 executor:float32 executor:float16

Every back end answers the same prompts through `ss-generate`; the base runs in float32. The first
difference of a prompt is printed with the base's top-1/top-2 margin there: a difference in half precision
without a near tie is a bug. Exit code 1 if a float32 back end differs anywhere.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("backends", nargs="+", metavar="BACKEND:DTYPE")
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=96)
    arguments = parser.parse_args()
    from ss_device.bundle import open_bundle
    from ss_runtime.tokenization import load_tokenizer

    bundle = open_bundle(arguments.bundle)
    adapter, tokenizer = bundle.adapter(), load_tokenizer(bundle)
    from ss_device.command_line import prompts_from_file

    rows = prompts_from_file(arguments.input, adapter.prompt, arguments.limit)
    prompts = [tokenizer.encode(prompt) for _, prompt in rows]
    settings = {"dtype": torch.float32, "trust_remote_code": False, "use_safetensors": True}
    model = AutoModelForCausalLM.from_pretrained(arguments.base, **settings).eval()
    expected = [continuation(model, p, arguments.max_tokens) for p in prompts]
    failed = False
    for spec in arguments.backends:
        name, dtype = spec.split(":")
        answers = run_backend(arguments, name, dtype)
        differences = compare(model, prompts, expected, answers)
        tokens, calls = sum(a["generated_tokens"] for a in answers), sum(a["steps"] for a in answers)
        print(
            f"{spec:20} identical {len(prompts) - len(differences)}/{len(prompts)}  "
            f"tokens per call {(tokens - len(prompts)) / calls:.3f}",
            flush=True,
        )
        for line in differences:
            print(f"    {line}")
        failed |= dtype == "float32" and bool(differences)
    return int(failed)


def continuation(model, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy tokens of the base alone, end token included."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


def run_backend(arguments: argparse.Namespace, name: str, dtype: str) -> list[dict]:
    """One `ss-generate --json` object per prompt."""
    command = [
        str(Path(sys.executable).with_name("ss-generate")), "--bundle", str(arguments.bundle),
        "--backend", name, "--dtype", dtype, "--input", str(arguments.input),
        "--limit", str(arguments.limit), "--max-tokens", str(arguments.max_tokens), "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr.strip()}")
    return [json.loads(line) for line in done.stdout.split("\n") if line]


@torch.no_grad()
def compare(model, prompts, expected, answers) -> list[str]:
    """One line per prompt whose tokens differ: where, which tokens, and the base's margin there."""
    lines = []
    for index, (prompt, wanted, answer) in enumerate(zip(prompts, expected, answers, strict=True)):
        got = answer["token_ids"]
        if got == wanted:
            continue
        position = next(
            (i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b),
            min(len(got), len(wanted)),
        )
        logits = model(torch.tensor([prompt + wanted[:position]])).logits[0, -1]
        top = logits.topk(2)
        margin = float(top.values[0] - top.values[1])
        lines.append(
            f"prompt {index} token {position}: {got[position : position + 1]} instead of "
            f"{wanted[position : position + 1]}, top-1/top-2 margin {margin:.5f}"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
