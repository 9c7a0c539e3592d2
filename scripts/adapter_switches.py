"""Random switches between resident adapters: how long one takes, and whether answers are a fresh load's.

    python -m scripts.adapter_switches BUNDLE --input 'DATA/{app}/test.jsonl.gz' --output runs/switches.json

Every request goes to an adapter drawn at random with a prompt drawn at random from all applications, over
one bank with shared prompt caches; its tokens and the accepted drafts of every call must be those that
the adapter gives when it is loaded by itself (`load_model`) and prefills the whole prompt. Then
the same step is timed with and without a switch before it, in turns, in this process's CPU time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from scripts.bundle_prompts import bundle_prompts
from ss_device.bundle import open_bundle
from ss_device.decoding import Drafter, decode
from ss_device.prompt_lookup import PromptLookup
from ss_device.tree import root_only
from ss_runtime.backends import load_openblas
from ss_runtime.settings import RuntimeSettings


def answer(model, drafter: Drafter, ids: list[int], limit: int) -> list[tuple[tuple[int, ...], int]]:
    """Tokens and number of accepted drafts of every call."""
    return [(tuple(step.tokens), step.num_drafted) for step in decode(model, drafter, ids, limit)]


def fresh_answers(bundle, prompts: list[list[int]], nodes: int, limit: int) -> dict:
    """(adapter, prompt number) → answer of a model that is loaded for this adapter alone."""
    from ss_runtime.mlx.loading import load_model

    found = {}
    for name, adapter in bundle.manifest.adapters.items():
        model = load_model(bundle, adapter, RuntimeSettings(dtype="float32"))
        drafter = Drafter(nodes, bigram_bias=bundle.bigram_bias(adapter), lookup=PromptLookup())
        for number, ids in enumerate(prompts):
            found[name, number] = answer(model, drafter, ids, limit)
    return found


def interleaved(bank, prompts, expected: dict, count: int, nodes: int, limit: int) -> dict:
    """`count` requests at random; how many answers are the fresh ones, and the seconds of `activate`."""
    rng = np.random.default_rng(7)
    equal, same_tokens, reused, switches, seconds, before = 0, 0, 0, 0, [], None
    while switches < count:
        name, number = str(rng.choice(bank.names)), int(rng.integers(len(prompts)))
        start = time.perf_counter()
        resident = bank.activate(name)
        seconds.append(time.perf_counter() - start)
        switches += before not in (None, name)
        before = name
        drafter = Drafter(nodes, bigram_bias=resident.bigram_bias, lookup=PromptLookup())
        found, wanted = answer(resident.model, drafter, prompts[number], limit), expected[name, number]
        equal += found == wanted
        same_tokens += [t for tokens, _ in found for t in tokens] == [t for k, _ in wanted for t in k]
        reused += resident.model.reused
    return {
        "requests": len(seconds),
        "switches": switches,
        "answers_equal": same_tokens,
        "answers_and_drafts_equal": equal,
        "prompt_tokens_reused": reused,
        "activate_ms": {"median": 1000 * statistics.median(seconds), "max": 1000 * max(seconds)},
    }


def switch_cost(bank, ids: list[int], rounds: int) -> dict:
    """CPU milliseconds of one plain step after the same prompt, with a switch before it and without.

    The switched step includes `activate`; models stand over one prompt cache, which is not prefilled again.
    """
    names, found = bank.names, {"same adapter": [], "switched": []}
    for name in names:  # every model has stepped once before it is timed
        bank.activate(name).model.prefill(ids)
    current = bank.activate(names[0]).model
    proposal = current.prefill(ids)
    tree = root_only(proposal.root)
    for number in range(rounds):
        for kind in ("same adapter", "switched"):
            start = time.process_time()
            if kind == "switched":
                current = bank.activate(names[(number + 1) % len(names)]).model
            current.step(tree)
            found[kind].append(1000 * (time.process_time() - start))
    differences = [b - a for a, b in zip(found["same adapter"], found["switched"], strict=True)]
    return {
        "rounds": rounds,
        **{
            kind: {"median": statistics.median(ms), "min": min(ms), "max": max(ms)}
            for kind, ms in found.items()
        },
        "difference": {"median": statistics.median(differences), "max": max(differences)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--input", required=True, help="JSON lines, {app} in the path")
    parser.add_argument("--prompts", type=int, default=8, help="per application")
    parser.add_argument("--switches", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=8, help="per answer")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    load_openblas()
    from ss_runtime.mlx.adapter_bank import AdapterBank

    bundle = open_bundle(arguments.bundle)
    by_app = bundle_prompts(bundle, arguments.input, arguments.prompts)
    prompts = [ids for texts in by_app.values() for ids in texts]
    expected = fresh_answers(bundle, prompts, arguments.nodes, arguments.tokens)
    start = time.perf_counter()
    bank = AdapterBank(bundle, RuntimeSettings(dtype="float32"), [])
    loading = {"base": time.perf_counter() - start}
    for name in sorted(bundle.manifest.adapters):
        start = time.perf_counter()
        bank.load(name)
        loading[name] = time.perf_counter() - start
    result = {
        "load_seconds": loading,
        "memory_bytes": {"base": bank.base_bytes, **bank.memory()},
        "step_ms": switch_cost(bank, prompts[0], 200),
        "interleaved": interleaved(
            bank, prompts, expected, arguments.switches, arguments.nodes, arguments.tokens
        ),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
