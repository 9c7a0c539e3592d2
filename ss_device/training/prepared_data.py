"""Training rows as they are read: sources by licence, held-out prompts removed, SQL literals as asked."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from ss_device.application import Application
from ss_device.json_lines import read_json_lines, source_of
from ss_device.outputs import file_in_one_go
from ss_device.sql_text import literals_as_asked
from ss_device.training.near_duplicates import HeldOutIndex


def prepare_rows(
    app: Application,
    train: Path,
    held_out: Iterable[Path],
    output: Path,
    exclude: tuple[str, ...] = (),
) -> dict:
    """Write the rows of `train` that may be learnt to `output` (.jsonl.gz) and return what was counted.

    Left out: rows of a source in `exclude`, and rows whose prompt is nearly one of the `held_out`
    files' (`HeldOutIndex`). Answers of an `sql` metric get their literals as the question writes them.
    Counts: rows read, written, excluded, near_duplicates, literals_rewritten, and `sources` (rows
    written of each).
    """
    index = HeldOutIndex(app.prompt(row) for path in held_out for row in read_json_lines(path))
    counts, sources = Counter(), Counter()

    def learnt() -> Iterator[dict]:
        for row in read_json_lines(train):
            counts["read"] += 1
            if source_of(row) in exclude:
                counts["excluded"] += 1
            elif index.holds(app.prompt(row)):
                counts["near_duplicates"] += 1
            else:
                counts["literals_rewritten"] += _rewrite(app, row)
                counts["written"] += 1
                sources[source_of(row)] += 1
                yield row

    write_rows(learnt(), output)
    return {**counts, "sources": dict(sources.most_common())}


def write_rows(rows: Iterable[dict], path: Path) -> None:
    """Write rows as `.jsonl.gz`, whole or not at all; the same rows give the same bytes."""
    with (
        file_in_one_go(path) as temporary,
        open(temporary, "wb") as raw,
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as file,
    ):
        for row in rows:
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())


def _rewrite(app: Application, row: dict) -> bool:
    """Put the literals of an SQL answer into the question's letter case; whether that changed the row."""
    if app.metric != "sql":
        return False
    # The context's column names are in lower case: only the question shows how a value is written.
    answer = literals_as_asked(row[app.reference], row.get("question", app.prompt(row)))
    changed, row[app.reference] = answer != row[app.reference], answer
    return changed
