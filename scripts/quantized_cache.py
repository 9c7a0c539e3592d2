"""What keys and values in 8 and 4 bits take, and whether they change the text.

    python -m scripts.quantized_cache BUNDLE --adapter sqlctx --input DATA/{app}/test.jsonl.gz --output FILE

For keys and values as they are, in 8 and in 4 bits, all in float32: bytes of the cache after a prompt of
--tokens tokens (the prompts joined), and every prompt's greedy text by plain decoding and by the adapter's
drafts (all nodes of the bundle). Told are texts that differ between the two ways, and how near a tie they
did; bytes of the committed codes that do; texts that keys and values as they are give too; tokens per call.
Finished texts stand in `FILE`'s `.rows.jsonl` and are not repeated by a later run with the same output.
"""

from __future__ import annotations

import argparse
import json
from itertools import chain, islice, product
from pathlib import Path

import numpy as np

from scripts.bundle_prompts import bundle_prompts
from scripts.same_text import text_of, tie
from ss_device.bundle import open_bundle
from ss_device.decoding import Drafter
from ss_runtime.backends import load_openblas, open_backend
from ss_runtime.settings import KV_BITS, RuntimeSettings

FLOAT = "float32"


def cache_size(model, prompts: list[list[int]], tokens: int) -> dict[str, int]:
    """Tokens of a long prompt, slots of the buffers that hold it, and their bytes."""
    ids = list(islice(chain.from_iterable(prompts * tokens), tokens))
    model.prefill(ids)
    cache = model.cache
    return {"tokens": cache.length, "slots": cache.capacity, "bytes": cache.num_bytes}


def committed(model) -> list[np.ndarray]:
    """Every array of the committed text; packed codes as bytes."""
    arrays = [np.array(b[:, :, : model.cache.length]) for layer in model.cache.layers for b in layer]
    return [a.view(np.uint8) if a.dtype == np.uint32 else a for a in arrays]


def compare(model, ids: list[int], drafter: Drafter, limit: int, stop: frozenset[int]) -> dict:
    """One prompt's text, plain and drafted."""
    plain, _ = text_of(model, Drafter(1), ids, limit, stop)
    before = committed(model)
    drafted, calls = text_of(model, drafter, ids, limit, stop)
    row = {"text": plain, "equal": plain == drafted, "tokens": len(drafted), "calls": calls}
    if plain != drafted:
        return row | {"tie": tie(model, ids, plain, drafted, None)}
    pairs = [(a, b) for a, b in zip(before, committed(model), strict=True) if a.dtype == np.uint8]
    shared = [min(a.shape[2], b.shape[2]) for a, b in pairs]  # drafts may commit more than the text
    pairs = [(a[:, :, :s], b[:, :, :s]) for (a, b), s in zip(pairs, shared, strict=True)]
    row["bytes_of_codes"] = sum(a.size for a, _ in pairs)
    row["other_bytes"] = int(sum((a != b).sum() for a, b in pairs))
    return row


def compare_all(models: dict[str, object], prompts, drafter, limit: int, stop, file: Path) -> list[dict]:
    """All rows, prompt by prompt; those of an earlier run are read from `file`, new ones added to it."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {(row["prompt"], row["kind"]) for row in rows}
    with file.open("a") as lines:
        for number, kind in product(range(len(prompts)), models):
            if (number, kind) not in known:
                row = compare(models[kind], prompts[number], drafter, limit, stop)
                rows.append({"prompt": number, "kind": kind, **row})
                print(json.dumps(rows[-1]), file=lines, flush=True)
    return rows


def totals(rows: list[dict], kind: str) -> dict:
    """Of one kind of keys and values."""
    own = [row for row in rows if row["kind"] == kind]
    as_they_are = {row["prompt"]: row["text"] for row in rows if row["kind"] == FLOAT}
    return {
        "prompts": len(own),
        "drafted_as_plain": sum(row["equal"] for row in own),
        "as_not_quantized": sum(row["text"] == as_they_are[row["prompt"]] for row in own),
        "tokens": sum(row["tokens"] for row in own),
        "tokens_per_call": sum(row["tokens"] - 1 for row in own) / sum(row["calls"] for row in own),
        "bytes_of_codes": sum(row.get("bytes_of_codes", 0) for row in own),
        "other_bytes": sum(row.get("other_bytes", 0) for row in own),
        "ties": [row["tie"] for row in own if "tie" in row],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--adapter", help="which of the bundle's adapters")
    parser.add_argument("--input", required=True, help="JSON lines, {app} in the path")
    parser.add_argument("--limit", type=int, default=20, help="prompts")
    parser.add_argument("--tokens", type=int, default=900, help="of the text whose cache is weighed")
    parser.add_argument("--max-tokens", type=int, help="per answer (default: the application's)")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    load_openblas()
    bundle = open_bundle(arguments.bundle)
    adapter = bundle.adapter(arguments.adapter)
    prompts = bundle_prompts(bundle, arguments.input, arguments.limit)[adapter.app]
    models = {
        str(bits or FLOAT): open_backend(bundle, adapter, RuntimeSettings("mlx", "float32", kv_bits=bits))
        for bits in (None, *sorted(KV_BITS, reverse=True))
    }
    drafter = Drafter(adapter.num_nodes, bigram_bias=bundle.bigram_bias(adapter))
    limit = min(arguments.max_tokens or adapter.max_tokens, adapter.max_tokens)
    stop = frozenset(bundle.manifest.architecture.eos_ids)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    file = arguments.output.with_suffix(".rows.jsonl")
    rows = compare_all(models, prompts, drafter, limit, stop, file)
    result = {
        kind: {**totals(rows, kind), "cache": cache_size(model, prompts, arguments.tokens)}
        for kind, model in models.items()
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
