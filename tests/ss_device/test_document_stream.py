"""The endless stream of training batches: order, shares, resume, permuted columns, sources by tag."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer

from ss_device.errors import UserError
from ss_device.training.document_stream import DocumentStream
from ss_device.training.recipe import Recipe, Schedule, Source, TokenizerTable
from ss_device.training.tokenizer import train_tokenizer

SQL = Source("application", 0.6, "rows.jsonl", "sqlctx")
TEXT = Source("text", 0.4, "text.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    data = tmp_path_factory.mktemp("stream")
    rows = [
        {
            "question": f"which {a} has {b} {n}?",
            "context": f"CREATE TABLE t{n} ({a} INTEGER, {b} VARCHAR, c INTEGER)",
            "answer": f"SELECT {a} FROM t{n} WHERE {b} = {n}",
            "source": f"{a}/x",
        }
        for a in ("stone", "apple")
        for b in ("weight", "colour")
        for n in range(10)
    ]
    (data / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    words = [{"text": "rivers and hills " * 9, "source": "y"} for _ in range(5)]
    (data / "text.jsonl").write_text("".join(json.dumps(r) + "\n" for r in words))
    return data


@pytest.fixture(scope="module")
def recipe():
    schedule = Schedule(
        tokens_per_batch=256, max_length=96, learning_rate=1e-3, warmup_steps=1, weight_decay=0.0
    )
    return Recipe("tiny", 5, TokenizerTable(320, 200), {}, schedule, (SQL, TEXT))


@pytest.fixture(scope="module")
def tokenizer(folder, recipe, tmp_path_factory):
    made = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(recipe, folder, made)
    return Tokenizer.from_file(str(made / "tokenizer.json"))


def ids_of(batches):
    return [[d.ids.tolist() for d in batch] for batch in batches]


def test_a_stream_goes_on_where_another_stopped(recipe, folder, tokenizer):
    whole = DocumentStream(recipe, folder, tokenizer)
    wanted = ids_of(whole.next_batch() for _ in range(70))
    for cut in (1, 30, 61):
        first = DocumentStream(recipe, folder, tokenizer)
        for _ in range(cut):
            first.next_batch()
        state = json.loads(json.dumps(first.state()))
        second = DocumentStream(recipe, folder, tokenizer)
        second.restore(state)
        assert ids_of(second.next_batch() for _ in range(70 - cut)) == wanted[cut:]
        assert second.tokens == whole.tokens
    other = DocumentStream(replace(recipe, sources=(SQL,)), folder, tokenizer)
    with pytest.raises(UserError, match="data sources, the recipe has"):
        other.restore(state)


def test_sources_have_their_share_of_tokens_and_every_row_its_turn(recipe, folder, tokenizer):
    stream = DocumentStream(recipe, folder, tokenizer)
    documents = []
    # Up to the end of a pool, whose batches are shuffled.
    while len(documents) < 1500 or stream.position < len(stream.batches):
        documents += stream.next_batch()
    sql = sum(len(d.ids) for d in documents if d.prompt_length)
    assert sql / sum(len(d.ids) for d in documents) == pytest.approx(0.6, abs=0.01)
    times: dict[tuple, int] = {}
    for document in documents:
        if document.prompt_length:
            key = tuple(document.ids)
            times[key] = times.get(key, 0) + 1
    assert len(times) == 40 and max(times.values()) - min(times.values()) <= 1
    assert stream.epochs()["rows.jsonl"] == pytest.approx(sum(times.values()) / 40)


def test_batches_keep_the_budget(recipe, folder, tokenizer):
    stream = DocumentStream(recipe, folder, tokenizer)
    for _ in range(60):
        batch = stream.next_batch()
        assert len(batch) * max(len(d.ids) for d in batch) <= 256


def test_columns_get_another_order_every_time(recipe, folder, tokenizer):
    permuted = replace(recipe, sources=(replace(SQL, weight=1.0, augmentation="permute_columns"),))
    stream = DocumentStream(permuted, folder, tokenizer)
    texts = [tokenizer.decode(d.ids.tolist()) for _ in range(60) for d in stream.next_batch()]
    first = [t for t in texts if "which stone has weight 3?" in t]
    assert len(first) > 5 and len(set(first)) > 2
    assert all("SELECT stone FROM t3 WHERE weight = 3" in t for t in first)
    orders = {t.split("(", 1)[1].split(")")[0] for t in first}
    assert all(sorted(o.split(", ")) == ["c INTEGER", "stone INTEGER", "weight VARCHAR"] for o in orders)
    wrong = replace(TEXT, augmentation="permute_columns", kind="application", app="sqlctx")
    plain = replace(recipe, sources=(wrong,))
    with pytest.raises(UserError):
        DocumentStream(plain, folder, tokenizer)


def test_rows_by_their_source_and_until_so_many_tokens(recipe, folder, tokenizer):
    apples = replace(recipe, sources=(replace(SQL, include=("apple",)), replace(SQL, exclude=("apple",))))
    stream = DocumentStream(apples, folder, tokenizer)
    sizes = [size for size, _ in stream.pools]
    assert sizes == [20, 20]
    rng = np.random.default_rng(0)
    texts = {tokenizer.decode(stream.pools[0][1](i, rng).ids.tolist()) for i in range(20)}
    assert all("which apple" in t for t in texts)
    repeat = Source("repeat", 0.5, until_tokens=6000)
    stream = DocumentStream(replace(recipe, sources=(SQL, repeat)), folder, tokenizer)
    while stream.tokens < 30000:
        stream.next_batch()
    late = [d for _ in range(30) for d in stream.next_batch()]
    assert all("SELECT" in tokenizer.decode(d.ids.tolist()) for d in late)
