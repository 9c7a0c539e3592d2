"""Is the text the same with drafts and without? Greedily, with a seed, and in distribution without one.

    python -m scripts.same_text BUNDLE --input 'DATA/{app}/test.jsonl.gz' --output runs/same_text.json

Every prompt is answered by plain decoding (one node) and with drafts (streams, n-grams, all nodes of the
bundle), greedily and at a temperature with one seed per prompt. Where a text differs, the row says how near
a tie the first differing token was: the gap of the two best logits, or the distance of the drawn number
from the nearest edge of the chosen token's interval. Unseeded sampling is drawn many times from one prompt
per adapter and held against probabilities from plain logits by a softmax written here (chi-square).
Finished prompts stand in `OUTPUT.rows.jsonl` and are not repeated by a later run with the same output.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from scipy.stats import chi2

from scripts.bundle_prompts import bundle_prompts
from ss_device.bundle import open_bundle
from ss_device.decoding import Drafter, decode
from ss_device.prompt_lookup import PromptLookup
from ss_device.sampling import Sampler, keyed_uniform
from ss_device.step_model import StepModel
from ss_runtime.backends import load_openblas
from ss_runtime.samplers import build_sampler
from ss_runtime.settings import RuntimeSettings

WAYS = ("greedy", "seeded")
TEMPERATURE, TOP_P = 0.8, 0.95
DRAWN_TOKENS, DRAW_TEMPERATURE = 3, 0.7


def text_of(model: StepModel, drafter: Drafter, ids, limit: int, stop, sampler=None) -> tuple[list, int]:
    """Generated tokens and model calls after the prompt's."""
    steps = list(decode(model, drafter, ids, limit, stop, sampler))
    return [token for step in steps for token in step.tokens], len(steps) - 1


def next_logits(model: StepModel, ids: Sequence[int]) -> np.ndarray:
    """Logits [V] after a text, by a prefill alone."""
    seen = []

    def look(kept: np.ndarray, logits: np.ndarray) -> np.ndarray:
        seen.append(np.array(logits[0], np.float64))
        return np.zeros(1, np.int32)

    model.prefill(ids, look)
    return seen[0]


def tie(model: StepModel, ids, first, second, sampler: Sampler | None) -> dict:
    """Where two texts part, and how near a tie the model was there."""
    pairs = enumerate(itertools.zip_longest(first, second))
    at = next(i for i, (a, b) in pairs if a != b)
    logits = next_logits(model, [*ids, *first[:at]])
    if sampler is None:
        best = np.sort(logits)[-2:]
        return {"token": at, "logit_gap": float(best[1] - best[0])}
    edges = np.cumsum(sampler.sampling.probabilities(logits))
    drawn = keyed_uniform(sampler.sampling.seed, len(ids) + at) * edges[-1]
    return {"token": at, "distance_to_edge": float(np.abs(edges - drawn).min())}


def questions(prompts: dict[str, list[list[int]]]) -> Iterator[tuple[int, str, str]]:
    """(prompt number, adapter, way of choosing), so that a part of them is of all kinds."""
    for number in range(max(map(len, prompts.values()))):
        for name in prompts:
            yield from ((number, name, way) for way in WAYS)


def compare(bank, name: str, way: str, number: int, ids: list[int], most: int | None) -> dict:
    """Plain against drafted answer of one prompt."""
    resident, stop = bank.activate(name), frozenset(bank.bundle.manifest.architecture.eos_ids)
    drafted = Drafter(resident.adapter.num_nodes, bigram_bias=resident.bigram_bias, lookup=PromptLookup())
    sampler = build_sampler(TEMPERATURE, {"top_p": TOP_P, "seed": number}) if way == "seeded" else None
    limit = min(most or resident.adapter.max_tokens, resident.adapter.max_tokens)
    plain, plain_calls = text_of(resident.model, Drafter(1), ids, limit, stop, sampler)
    fast, calls = text_of(resident.model, drafted, ids, limit, stop, sampler)
    row = {"prompt": number, "adapter": name, "way": way, "equal": plain == fast, "tokens": len(plain)}
    row |= {"plain_calls": plain_calls, "calls": calls}
    return row if plain == fast else row | {"tie": tie(resident.model, ids, plain, fast, sampler)}


def compare_all(bank, prompts: dict[str, list[list[int]]], most: int | None, file: Path) -> list[dict]:
    """All rows, those of an earlier run read from `file`, new ones added to it."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {(row["prompt"], row["adapter"], row["way"]) for row in rows}
    with file.open("a") as lines:
        for number, name, way in questions(prompts):
            if (number, name, way) not in known:
                rows.append(compare(bank, name, way, number, prompts[name][number], most))
                print(json.dumps(rows[-1]), file=lines, flush=True)
    return rows


def totals(rows: list[dict]) -> dict:
    """Counts by way of choosing and adapter, and every difference."""
    found: dict[str, dict] = {way: {} for way in WAYS}
    for row in rows:
        entry = found[row["way"]].setdefault(row["adapter"], Counter())
        entry.update({"prompts": 1, **{k: row[k] for k in ("equal", "tokens", "plain_calls", "calls")}})
    return found | {"differences": [row for row in rows if not row["equal"]]}


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp((logits - logits.max()) / DRAW_TEMPERATURE)
    return powers / powers.sum()


def exact_probabilities(model: StepModel, ids: list[int], floor: float) -> dict[tuple[int, ...], float]:
    """Probabilities of the texts of DRAWN_TOKENS tokens likelier than `floor`, from plain logits."""
    found = {(): 1.0}
    for _ in range(DRAWN_TOKENS):
        longer = {}
        for text, p in found.items():
            following = p * softmax(next_logits(model, [*ids, *text]))
            for token in np.flatnonzero(following >= floor):
                longer[(*text, int(token))] = float(following[token])
        found = longer
    return found


def chi_square(bank, name: str, ids: list[int], count: int) -> dict:
    """Unseeded texts drawn with drafts against their exact probabilities; rare ones are one cell."""
    resident = bank.activate(name)
    drafter = Drafter(8, bigram_bias=resident.bigram_bias, lookup=PromptLookup())
    drawn, calls = Counter(), 0
    for _ in range(count):
        sampler = build_sampler(DRAW_TEMPERATURE, {})
        tokens, steps = text_of(resident.model, drafter, ids, DRAWN_TOKENS, frozenset(), sampler)
        drawn[tuple(tokens)] += 1
        calls += steps
    expected = exact_probabilities(resident.model, ids, 5 / count)
    rest = 1 - sum(expected.values())
    wanted = np.array([*expected.values(), rest]) * count
    seen = [drawn[text] for text in expected]
    seen = np.array([*seen, count - sum(seen)])
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    return {
        "draws": count,
        "cells": len(wanted),
        "rest": rest,
        "statistic": statistic,
        "p": float(chi2.sf(statistic, len(wanted) - 1)),
        "calls_per_draw": calls / count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--input", required=True, help="JSON lines, {app} in the path")
    parser.add_argument("--limit", type=int, default=100, help="prompts per adapter")
    parser.add_argument("--max-tokens", type=int, help="per answer (default: the application's)")
    parser.add_argument("--draws", type=int, default=2000, help="unseeded texts per adapter")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    load_openblas()
    from ss_runtime.mlx.adapter_bank import AdapterBank

    bundle = open_bundle(arguments.bundle)
    prompts = bundle_prompts(bundle, arguments.input, arguments.limit)
    bank = AdapterBank(bundle, RuntimeSettings(dtype="float32"))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    rows = compare_all(bank, prompts, arguments.max_tokens, arguments.output.with_suffix(".rows.jsonl"))
    result = {
        "sampling": {"temperature": TEMPERATURE, "top_p": TOP_P},
        "max_tokens": arguments.max_tokens,
        **totals(rows),
        "unseeded": {n: chi_square(bank, n, texts[0], arguments.draws) for n, texts in prompts.items()},
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
