"""Applications as data: `apps/<name>/app.toml` says how a row becomes a prompt and a completion."""

from __future__ import annotations

import os
import string
from dataclasses import dataclass
from pathlib import Path

from ss_device.conversation import Piece, TurnTemplate, read_messages
from ss_device.errors import UserError, one_line
from ss_device.json_lines import located
from ss_device.names import check_name
from ss_device.strict_json import read_toml

KINDS = ("pair", "chat")
METRICS = ("exact_match", "sql", "rouge", "none")
OVER_REFERENCES = ("best", "mean")
TEXTS = ("title", "template", "completion", "hub", "hub_config", "split", "reference", "schema", "slots")


@dataclass(frozen=True)
class Application:
    """One application: prompt template, data set, metric and stop rules (`app.toml`).

    kind `pair`: `template` makes the prompt, `completion` the text to generate. kind `chat`: rows are
    conversations, `chat` says how they become text; every assistant turn is generated. columns: our
    field → the hub data set's column. over_references: a prompt's score is its `best` reference's or
    the `mean` over references. schema: the field with CREATE TABLE statements, where answers are SQL that
    can be executed; slots: the field with a meaning representation, whose slots a text must state.
    stop_strings end a text and are cut off it.
    """

    name: str
    title: str
    template: str
    completion: str
    hub: str
    columns: dict[str, str]
    metric: str
    reference: str
    stop_strings: tuple[str, ...]
    max_tokens: int
    kind: str = "pair"
    split: str = "train"
    hub_config: str = ""
    over_references: str = "best"
    schema: str = ""
    slots: str = ""
    chat: TurnTemplate | None = None

    def pieces(self, row: dict) -> list[Piece]:
        """The row's text in order, generated parts marked. Raises UserError naming row and field."""
        try:
            if self.kind == "chat":
                return self.chat.pieces(read_messages(row))
            return [Piece(self.prompt(row), False), Piece(self.completion_text(row), True)]
        except UserError as error:
            raise located(error, row) from error

    def prompt(self, row: dict) -> str:
        """The prompt text of a data row. Raises UserError when the row lacks a field.

        Of a conversation: the text before the last assistant turn.
        """
        if self.kind == "chat":
            pieces = self.chat.pieces(read_messages(row))
            last = max(i for i, piece in enumerate(pieces) if piece.generated)
            return "".join(piece.text for piece in pieces[:last])
        return fill_template(self.template, row, self.name)

    def completion_text(self, row: dict) -> str:
        """The target text of a data row; of a conversation its last assistant turn."""
        if self.kind == "chat":
            return [p.text for p in self.chat.pieces(read_messages(row)) if p.generated][-1]
        return fill_template(self.completion, row, self.name)

    def references(self, row: dict) -> list[str]:
        """What a generated text is compared with: the list field `references`, or the one field.

        Raises UserError naming the row and the field that is missing or has another type.
        """
        try:
            if self.kind == "chat":
                return [self.completion_text(row)]
            many = row.get("references")
            if many is not None:
                if not isinstance(many, list) or not many or not all(isinstance(r, str) for r in many):
                    raise UserError("field 'references' is not a list of texts with at least one")
                return list(many)
            return [fill_template("{" + self.reference + "}", row, self.name)]
        except UserError as error:
            raise located(error, row) from error


def template_fields(template: str) -> list[str]:
    """Names of the `{fields}` in a template, in order of appearance.

    Raises UserError for anything but plain names (`{a.b}`, `{a[0]}`, `{a!r}`, `{a:>99}`), which could reach
    into objects or fill memory, and for braces that do not match.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except (ValueError, TypeError) as error:
        raise UserError(f"template {template!r:.60}: {error}") from error
    for _, name, form, conversion in parts:
        if name is not None and (not name.isidentifier() or form or conversion):
            raise UserError(f"template {template!r:.60}: '{{{name}}}' is not the plain name of a field")
    return [name for _, name, _, _ in parts if name]


def fill_template(template: str, row: dict, application: str) -> str:
    """Fill `template` from `row`; a missing field is a UserError that names it and what is there."""
    names = template_fields(template)
    for name in names:
        if name not in row:
            raise UserError(
                f"application '{application}': the row has no field '{name}' "
                f"(expected {', '.join(names)}; found {', '.join(row) or 'none'})"
            )
        value = row[name]
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise UserError(
                f"application '{application}': field '{name}' is {type(value).__name__}, expected text"
            )
    return template.format_map({name: row[name] for name in names})


def applications_folder() -> Path:
    """Where `app.toml` files live: `$SS_APPS`, `./apps`, or the `apps` beside this package."""
    candidates = [Path("apps"), Path(__file__).resolve().parent.parent / "apps"]
    if os.environ.get("SS_APPS"):
        candidates.insert(0, Path(os.environ["SS_APPS"]))
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise UserError("no folder 'apps' with application descriptions found (set SS_APPS)")


def load_application(name: str) -> Application:
    """Read `apps/<name>/app.toml`, or the folder or file `name` is the path of.

    Raises UserError listing the known names when it is unknown, or naming the entry that is wrong.
    """
    path = _application_file(name)
    raw = read_toml(path)
    try:
        return _application(raw)
    except KeyError as error:
        raise UserError(f"{path}: not a valid application description: {error} is missing") from error
    except (TypeError, ValueError, AttributeError, UserError) as error:
        raise UserError(f"{path}: not a valid application description ({one_line(error)})") from error


def _application_file(name: str) -> Path:
    given = Path(name)
    if given.suffix == ".toml" and given.is_file():
        return given
    if os.sep in name and (given / "app.toml").is_file():
        return given / "app.toml"
    folder = applications_folder()
    path = folder / name / "app.toml"
    if not path.is_file():
        known = sorted(p.parent.name for p in folder.glob("*/app.toml"))
        raise UserError(f"unknown application '{name}' (found: {', '.join(known) or 'none'})")
    return path


def _application(raw: dict) -> Application:
    kind = _one_of(raw.get("kind", "pair"), KINDS, "kind")
    data, metric, stop = (_table(raw, name) for name in ("data", "metric", "stop"))
    chat = kind == "chat"
    strings = stop.get("strings", [])
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise UserError("stop.strings is not a list of non-empty texts")
    max_tokens = stop.get("max_tokens", 256)
    if type(max_tokens) is not int or not 1 <= max_tokens < 1 << 31:
        raise UserError(f"stop.max_tokens {max_tokens!r:.40} is no whole number of at least 1")
    made = Application(
        name=check_name(raw["name"], "name"),
        title=raw.get("title", raw["name"]),
        template="{prompt}" if chat else raw["prompt"]["template"],
        completion="" if chat else raw["prompt"]["completion"],
        hub=data.get("hub", ""),
        columns=data.get("columns", {}),
        metric=_one_of(metric.get("name", "none") if chat else metric["name"], METRICS, "metric.name"),
        reference="" if chat else metric["reference"],
        stop_strings=tuple(strings),
        max_tokens=max_tokens,
        kind=kind,
        split=data.get("split", "train"),
        hub_config=data.get("config", ""),
        over_references=_one_of(
            metric.get("over_references", "best"), OVER_REFERENCES, "metric.over_references"
        ),
        schema=metric.get("schema", ""),
        slots=metric.get("slots", ""),
        chat=TurnTemplate.from_dict(_table(raw, "chat")) if chat else None,
    )
    for name in TEXTS:
        if not isinstance(getattr(made, name), str):
            raise UserError(f"{name} is {type(getattr(made, name)).__name__}, expected text")
    columns = made.columns
    if not isinstance(columns, dict) or not all(isinstance(c, str) for c in columns.values()):
        raise UserError("data.columns is not a table of texts")
    for template in (made.template, made.completion):
        template_fields(template)
    return made


def _table(raw: dict, name: str) -> dict:
    value = raw.get(name, {})
    if not isinstance(value, dict):
        raise UserError(f"{name} is {type(value).__name__}, expected a table")
    return value


def _one_of(value: object, known: tuple[str, ...], entry: str) -> str:
    if not isinstance(value, str) or value not in known:
        raise UserError(f"{entry} {value!r:.60} is not one of {', '.join(known)}")
    return value
