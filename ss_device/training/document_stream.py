"""An endless stream of training batches from a recipe's sources, resumable at any batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from ss_device.application import load_application
from ss_device.errors import UserError
from ss_device.sql_text import with_permuted_columns
from ss_device.strict_json import typed
from ss_device.training.batching import plan_batches
from ss_device.training.corpus import (
    BOS,
    EOS,
    Document,
    repeated_spans,
    source_rows,
    tokenized_documents,
)
from ss_device.training.recipe import Recipe, Schedule, Source

POOL_BATCHES = 24
"""Documents are drawn for so many batches at a time and put into batches of similar length."""

MOST_OWED = 1e6
"""Tokens that a source can be behind or ahead of its share: a document's length."""

Draw = Callable[[int, np.random.Generator], Document]


@dataclass(frozen=True)
class Cursor:
    """Where a source is read: epoch, row of the epoch's order, tokens that it is behind its share."""

    epoch: int
    index: int
    owed: float


@dataclass(frozen=True)
class StreamState:
    """What `DocumentStream.state` gives."""

    pool: int
    tokens: int
    cursors: tuple[Cursor, ...]
    position: int


class DocumentStream:
    """Batches of documents, mixed by token weight; every source is read in a new order in every epoch.

    What batch n holds depends on the recipe and the data alone. `state` and `restore` give and take
    JSON, so a run goes on where another one stopped.
    """

    def __init__(self, recipe: Recipe, data: Path, tokenizer: Tokenizer) -> None:
        self.seed, self.schedule, self.sources = recipe.seed, recipe.schedule, recipe.sources
        self.pools = [_open_source(s, data, tokenizer, recipe) for s in recipe.sources]
        self.pool, self.position, self.tokens = 0, 0, 0
        self.cursors = [{"epoch": 0, "index": 0, "owed": 0.0} for _ in recipe.sources]
        self.orders: dict[tuple[int, int], np.ndarray] = {}
        self.batches: list[list[Document]] = []
        self.at_pool_start = self._snapshot()

    def next_batch(self) -> list[Document]:
        """The next batch, at most `tokens_per_batch` tokens with padding (or one longer document)."""
        if self.position == len(self.batches):
            self._draw_pool()
        self.position += 1
        batch = self.batches[self.position - 1]
        self.tokens += sum(len(d.ids) for d in batch)
        return batch

    def epochs(self) -> dict[str, float]:
        """How often each file's rows have been read, by path (and sources), for the log."""
        read = {}
        for source, cursor, (size, _) in zip(self.sources, self.cursors, self.pools, strict=True):
            if size:
                name = "/".join([source.path, *source.include])
                read[name] = round(cursor["epoch"] + cursor["index"] / size, 3)
        return read

    def state(self) -> dict:
        """All that `restore` needs, as JSON."""
        return {**self.at_pool_start, "position": self.position}

    def restore(self, state: dict) -> None:
        """Go on behind the batch after which `state` was taken."""
        found = typed(StreamState, state, "the run's place in its data")
        if len(found.cursors) != len(self.sources):
            raise UserError(
                f"the run to resume had {len(found.cursors)} data sources, the recipe has "
                f"{len(self.sources)}: 'cursors' of its record do not fit; start a new one"
            )
        if min(found.pool, found.tokens, *(c.epoch for c in found.cursors)) < 0:
            raise UserError("the run's place in its data is not one of these files")
        for cursor, (size, _) in zip(found.cursors, self.pools, strict=True):
            if not 0 <= cursor.index < max(size, 1) or abs(cursor.owed) > MOST_OWED:
                raise UserError("the run's place in its data is not one of these files")
        self.cursors = [asdict(cursor) for cursor in found.cursors]
        self.pool, self.tokens = found.pool, found.tokens
        self._draw_pool()
        if not 0 <= found.position <= len(self.batches):
            raise UserError(f"the run's place in its data, batch {found.position}, is not one of its pool")
        for _ in range(found.position):
            self.next_batch()

    def _snapshot(self) -> dict:
        return {"pool": self.pool, "tokens": self.tokens, "cursors": [dict(c) for c in self.cursors]}

    def _draw_pool(self) -> None:
        self.at_pool_start = self._snapshot()
        rng = np.random.default_rng([self.seed, self.pool])
        documents: list[Document] = []
        for number, (source, cursor) in enumerate(zip(self.sources, self.cursors, strict=True)):
            if source.until_tokens and self.tokens >= source.until_tokens:
                continue
            cursor["owed"] += POOL_BATCHES * self.schedule.tokens_per_batch * source.weight
            while cursor["owed"] > 0:
                document = self._next_document(number, rng)
                cursor["owed"] -= len(document.ids)
                documents.append(document)
        documents = [documents[i] for i in rng.permutation(len(documents))]
        lengths, size = [len(d.ids) for d in documents], self.schedule.tokens_per_batch
        plan = plan_batches(lengths, size, rng, pool=len(documents))
        self.batches, self.position = [[documents[i] for i in batch] for batch in plan], 0
        self.pool += 1

    def _next_document(self, number: int, rng: np.random.Generator) -> Document:
        size, draw = self.pools[number]
        cursor = self.cursors[number]
        if not size:
            return draw(0, rng)
        key = (number, cursor["epoch"])
        if key not in self.orders:
            self.orders = {k: v for k, v in self.orders.items() if k[0] != number}
            self.orders[key] = np.random.default_rng([self.seed, *key]).permutation(size)
        index = int(self.orders[key][cursor["index"]])
        cursor["index"] += 1
        if cursor["index"] == size:
            cursor["epoch"], cursor["index"] = cursor["epoch"] + 1, 0
        return draw(index, rng)


def _open_source(source: Source, data: Path, tokenizer: Tokenizer, recipe: Recipe) -> tuple[int, Draw]:
    """(number of documents, how to draw one); the number is 0 where documents are made up."""
    if source.kind == "repeat":
        bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
        return 0, lambda _, rng: repeated_spans(1, recipe.vocab_size, rng, bos, eos)[0]
    if source.augmentation == "permute_columns":
        return _with_permuted_columns(source, data, tokenizer, recipe.schedule)
    documents = tokenized_documents(source, data, tokenizer, recipe.schedule.max_length)
    return len(documents), lambda index, _: documents[index]


def _with_permuted_columns(
    source: Source, data: Path, tokenizer: Tokenizer, schedule: Schedule
) -> tuple[int, Draw]:
    """Rows whose `context` gets another order of tables and columns at every draw."""
    app = load_application(source.app)
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)

    def document(row: dict) -> Document:
        texts = (app.prompt(row), app.completion_text(row))
        prompt, completion = (tokenizer.encode(t, add_special_tokens=False).ids for t in texts)
        return Document(np.array([bos, *prompt, *completion, eos], np.int32), 1 + len(prompt))

    rows = list(source_rows(source, data))
    texts = [app.prompt(row) + app.completion_text(row) for row in rows]
    lengths = [len(e.ids) for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    # Two special tokens; and an order of columns changes where a text is cut into tokens.
    longest = schedule.max_length - 10
    rows = [row for row, length in zip(rows, lengths, strict=True) if length <= longest]
    if not rows or any("context" not in row for row in rows):
        raise UserError(f"{data / source.path}: permute_columns needs rows with a field 'context'")

    def draw(index: int, rng: np.random.Generator) -> Document:
        row = rows[index]
        context = with_permuted_columns(row["context"], lambda n: rng.permutation(n).tolist())
        made = document({**row, "context": context})
        return made if len(made.ids) <= schedule.max_length else document(row)

    return len(rows), draw
