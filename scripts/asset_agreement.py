"""Answers of Core AI assets by Apple's runtime against Hugging Face's `generate` and plain decoding.

    ss-convert --adapter A ... --target mlx,coreai --nodes 8 --output DRAFTED
    ss-convert --adapter A ... --target mlx,coreai --nodes 1 --output PLAIN
    python -m scripts.asset_agreement DRAFTED --plain PLAIN --input 'DATA/{app}/test.jsonl.gz' --limit 200 \
        --output runs/asset_agreement.json

Every prompt is answered with drafts on the first bundle's asset, plainly on the second one's (an asset of
one node costs less per call), and by Hugging Face on the same base weights in float32. Where an answer
differs, the row says how near a tie the model was there: the gap between its two best logits, by Hugging
Face. Finished prompts stand in `OUTPUT.rows.jsonl` and are not repeated by a later run. For lossless
adapters, whose output is the base's own.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from scripts.bundle_prompts import bundle_prompts
from ss_device.bundle import Bundle, open_bundle
from ss_device.decoding import Drafter, decode
from ss_device.errors import UserError
from ss_runtime.backends import hugging_face_model, open_backend
from ss_runtime.settings import RuntimeSettings


class Answers:
    """The three ways of answering a prompt of one adapter."""

    def __init__(self, drafted: Bundle, plain: Bundle | None, app: str, dtype: str, base) -> None:
        adapter = drafted.adapter(app)
        if adapter.config.mode != "lossless":
            raise UserError(f"adapter '{app}' is not lossless: its answers are not the base's")
        settings = RuntimeSettings(backend="coreai", dtype=dtype)
        self.base, self.limit = base, adapter.max_tokens
        self.stop = frozenset(drafted.manifest.architecture.eos_ids)
        self._drafter = Drafter(adapter.num_nodes, bigram_bias=drafted.bigram_bias(adapter))
        self._drafted = open_backend(drafted, adapter, settings)
        self._plain = plain and open_backend(plain, plain.adapter(app), settings)

    def of(self, ids: Sequence[int]) -> dict:
        """Token ids by way of answering, and model calls with drafts."""
        steps = list(decode(self._drafted, self._drafter, ids, self.limit, self.stop))
        found = {"calls": len(steps) - 1, "drafted": [t for step in steps for t in step.tokens]}
        if self._plain:
            steps = decode(self._plain, Drafter(1), ids, self.limit, self.stop)
            found["plain"] = [token for step in steps for token in step.tokens]
        return found | {"hugging_face": self._generated(ids)}

    def _generated(self, ids: Sequence[int]) -> list[int]:
        with torch.no_grad():
            out = self.base.generate(
                torch.tensor([list(ids)]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=self.limit,
                do_sample=False,
                eos_token_id=sorted(self.stop),
                pad_token_id=0,
            )
        return out[0, len(ids) :].tolist()

    def tie(self, ids: Sequence[int], wanted: list[int], found: list[int]) -> dict:
        """Where two answers part, and the gap of the model's two best logits there."""
        pairs = enumerate(itertools.zip_longest(wanted, found))
        at = next(index for index, (a, b) in pairs if a != b)
        with torch.no_grad():
            logits = self.base(torch.tensor([[*ids, *wanted[:at]]])).logits[0, -1]
        best = torch.topk(logits, 2).values
        return {"token": at, "logit_gap": float(best[0] - best[1])}


def row_of(answers: Answers, app: str, number: int, ids: Sequence[int]) -> dict:
    """What a prompt came to; ties where an answer is not Hugging Face's."""
    found = answers.of(ids)
    wanted = found["hugging_face"]
    row = {"prompt": number, "adapter": app, "tokens": len(wanted), "calls": found["calls"]}
    for way in ("drafted", "plain"):
        if way in found:
            row[way] = found[way] == wanted
            if not row[way]:
                row[f"{way} parts"] = answers.tie(ids, wanted, found[way])
    return row


def totals(rows: list[dict]) -> dict:
    """Counts by adapter, and every difference."""
    found: dict[str, Counter] = {}
    for row in rows:
        counted = {k: int(row[k]) for k in ("tokens", "calls", "drafted", "plain") if k in row}
        found.setdefault(row["adapter"], Counter()).update({"prompts": 1, **counted})
    different = [row for row in rows if not (row["drafted"] and row.get("plain", True))]
    return {"adapters": found, "differences": different}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--plain", type=Path, help="bundle of the same adapters with one node")
    parser.add_argument("--input", required=True, help="JSON lines, {app} in the path")
    parser.add_argument("--adapter", help="one adapter of the bundle (default: all)")
    parser.add_argument("--limit", type=int, default=200, help="prompts per adapter")
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    drafted = open_bundle(arguments.bundle)
    plain = arguments.plain and open_bundle(arguments.plain)
    context = min(adapter.coreai.context for adapter in drafted.manifest.adapters.values())
    prompts = bundle_prompts(drafted, arguments.input, arguments.limit, context)
    if arguments.adapter:
        prompts = {arguments.adapter: prompts[drafted.adapter(arguments.adapter).app]}
    base = hugging_face_model(drafted).eval()
    file = arguments.output.with_suffix(".rows.jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {(row["prompt"], row["adapter"]) for row in rows}
    answers = {app: Answers(drafted, plain, app, arguments.dtype, base) for app in prompts}
    with file.open("a") as lines:
        for number in range(arguments.limit):
            for app, texts in prompts.items():
                if (number, app) not in known:
                    rows.append(row_of(answers[app], app, number, texts[number]))
                    print(json.dumps(rows[-1]), file=lines, flush=True)
    result = {"dtype": arguments.dtype, "limit": arguments.limit, **totals(rows)}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
