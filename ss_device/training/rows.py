"""Rows of an application's data: JSON lines files, or its hub data set through `datasets`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ss_device.application import Application
from ss_device.errors import UserError, one_line
from ss_device.files import sha256
from ss_device.json_lines import Row, read_json_lines

Source = str | Path | Iterable[str | Path | Mapping]
"""A file, `hub` or `hub:SPLIT`; or several of them, or rows."""


def read_rows(app: Application, source: Source) -> Iterator[Row]:
    """Rows of a `.jsonl`/`.jsonl.gz` file, or of the application's data set for `hub` and `hub:SPLIT`.

    source: one of them, several, or the rows themselves. Hub columns are renamed as `[data] columns` says.
    Raises UserError naming file and line, data set, split and row, or the number of a row.
    """
    if not isinstance(source, str | Path):
        return _given_rows(app, source)
    name, _, split = str(source).partition(":")
    if name == "hub":
        return _hub_rows(app, split or app.split)
    return read_json_lines(source)


def _given_rows(app: Application, source: Iterable) -> Iterator[Row]:
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        raise UserError(f"data is {type(source).__name__}, expected a file, files or rows")
    for number, item in enumerate(source, 1):
        if isinstance(item, str | Path):
            yield from read_rows(app, item)
        elif isinstance(item, Mapping):
            yield Row(dict(item), f"data row {number}")
        else:
            raise UserError(f"data row {number} is {type(item).__name__}, expected an object or a file")


def source_identity(app: Application, source: Path | str) -> str:
    """What tells one source from another: a file's sha256, or data set and split."""
    name, _, split = str(source).partition(":")
    if name == "hub":
        return f"{app.hub}[{split or app.split}]"
    if not Path(source).is_file():
        raise UserError(f"{source}: no such file")
    return sha256(Path(source))


def _hub_rows(app: Application, split: str) -> Iterator[Row]:
    import datasets

    if not app.hub:
        raise UserError(f"application '{app.name}' names no hub data set (data.hub in app.toml)")
    datasets.disable_progress_bars()
    try:
        table = datasets.load_dataset(app.hub, app.hub_config or None, split=split)
    except Exception as error:  # the library raises many kinds: network, unknown name, split, format
        raise UserError(
            f"data set '{app.hub}', split '{split}': cannot be read ({one_line(error)[:300]})"
        ) from error
    for field, column in app.columns.items():
        if column not in table.column_names:
            raise UserError(
                f"data set '{app.hub}', split '{split}': no column '{column}' for field '{field}' "
                f"(found {', '.join(table.column_names)})"
            )
    for number, raw in enumerate(table):
        row = {**raw, **{field: raw[column] for field, column in app.columns.items()}}
        yield Row(row, f"{app.hub}[{split}] row {number}")
