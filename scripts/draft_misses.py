"""Which tokens a drafter misses: SQL words, copies from the prompt, or others.

python scripts/draft_misses.py ADAPTER --base BASE --data test.jsonl.gz --limit 60
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

from ss_device.adapter import load_adapter
from ss_device.application import load_application
from ss_device.base_model import open_base
from ss_device.command_line import add_device
from ss_device.decoding import Drafter, decode
from ss_device.reference.device import chosen_device
from ss_device.reference.step_model import ReferenceStepModel
from ss_device.reference.stream_model import load_stream_model
from ss_device.tokenizer_file import read_tokenizer
from ss_device.training.examples import load_prompts

SQL = "SELECT FROM WHERE AND COUNT MAX MIN SUM AVG ORDER BY JOIN ON AS table"
TEMPLATE = {*SQL.split(), *'=_><(),*"'}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--nodes", type=int, default=32)
    add_device(parser)
    arguments = parser.parse_args()
    base, adapter = open_base(arguments.base), load_adapter(arguments.adapter)
    app, tokenizer = (
        load_application(adapter.app),
        read_tokenizer(arguments.base),
    )
    stream_model = load_stream_model(base, adapter, device=chosen_device(arguments.device))
    model = ReferenceStepModel(stream_model, arguments.nodes)
    drafter = Drafter(arguments.nodes, parent_bias=adapter.parent_bias())
    tokens, own = Counter(), Counter()
    for text, _ in load_prompts(app, arguments.data, arguments.limit, 0):
        prompt = [base.architecture.bos_id, *tokenizer.encode(text).ids]
        steps = decode(model, drafter, prompt, app.max_tokens, frozenset(base.architecture.eos_ids))
        for step in list(steps)[1:]:
            for index, token in enumerate(step.tokens):
                name = kind(tokenizer.decode([token]), token in prompt)
                tokens[name] += 1
                own[name] += index >= step.num_drafted
    for name, count in tokens.most_common():
        share = own[name] / sum(own.values())
        print(f"{name:15} {count:6} drafted {1 - own[name] / count:.2f}  share of own tokens {share:.2f}")


def kind(text: str, in_prompt: bool) -> str:
    """Class of a generated token; special tokens decode to nothing and count as SQL."""
    if re.fullmatch(r"\s*\d+", text):
        return "digits copied" if in_prompt else "digits new"
    if text.strip() in TEMPLATE | {""}:
        return "SQL"
    return "word copied" if in_prompt else "word new"


if __name__ == "__main__":
    main()
