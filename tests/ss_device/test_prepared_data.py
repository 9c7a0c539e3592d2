"""Prepared training rows: near-duplicates of held-out prompts, licences, literals, the same bytes."""

from __future__ import annotations

import json
import random

import pytest

from ss_device.application import load_application
from ss_device.errors import UserError
from ss_device.json_lines import read_json_lines
from ss_device.training.near_duplicates import HeldOutIndex, shingles
from ss_device.training.prepared_data import prepare_rows


def test_the_index_finds_what_comparing_all_pairs_finds():
    rng = random.Random(3)
    words = [f"w{n}" for n in range(40)]
    held = [" ".join(rng.choices(words, k=rng.randint(2, 30))) for _ in range(150)]
    own = []
    for text in held:
        changed = text.split()
        changed[rng.randrange(len(changed))] = "other"
        own += [" ".join(changed), text.upper(), " ".join(rng.choices(words, k=20))]
    for threshold in (0.5, 0.8, 1.0):
        index, sets = HeldOutIndex(held, threshold), [shingles(t) for t in held]
        found = [index.holds(text) for text in own]
        wanted = [any(len(shingles(t) & s) >= threshold * len(shingles(t) | s) for s in sets) for t in own]
        assert found == wanted and any(found) and not all(found)


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def row(question, answer, source="a"):
    context = "CREATE TABLE league (club VARCHAR, points INTEGER)"
    return {"question": question, "context": context, "answer": answer, "source": source}


def test_rows_that_may_be_learnt(tmp_path):
    asked = "How many points has the club Leeds Rovers in all its years?"
    held = write(tmp_path / "test.jsonl", [row(asked, "SELECT 1")])
    train = write(tmp_path / "train.jsonl", [
        row(asked.lower().strip("?"), "SELECT 2"),
        row("Which club has 3 points?", "SELECT club FROM league WHERE points = 3", "b/x"),
        row("How many points has York?", 'SELECT points FROM league WHERE club = "york"'),
        row("Points of Hull?", "SELECT points FROM league", "nc"),
    ])  # fmt: skip
    app, output = load_application("sqlctx"), tmp_path / "data/train.jsonl.gz"
    counts = prepare_rows(app, train, [held], output, exclude=("nc",))
    assert counts == {
        "read": 4, "near_duplicates": 1, "excluded": 1, "literals_rewritten": 1, "written": 2,
        "sources": {"b": 1, "a": 1},
    }  # fmt: skip
    answers = [r["answer"] for r in read_json_lines(output)]
    assert answers[0] == "SELECT club FROM league WHERE points = 3"
    assert answers[1:] == ['SELECT points FROM league WHERE club = "York"']
    before = output.read_bytes()
    prepare_rows(app, train, [held], output, exclude=("nc",))
    assert output.read_bytes() == before
    with pytest.raises(UserError, match="no such file"):
        prepare_rows(app, tmp_path / "none.jsonl", [held], output)
    assert output.read_bytes() == before
