"""Applications as data: `apps/<name>/app.toml` says how a row becomes a prompt and a completion."""

from __future__ import annotations

import os
import string
import tomllib
from dataclasses import dataclass
from pathlib import Path

from ss_device.errors import UserError


@dataclass(frozen=True)
class Application:
    """One application: prompt template, data set, metric and stop rules (`app.toml`)."""

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

    def prompt(self, row: dict) -> str:
        """The prompt text of a data row. Raises UserError when the row lacks a field."""
        return fill_template(self.template, row, self.name)

    def completion_text(self, row: dict) -> str:
        """The target text of a data row."""
        return fill_template(self.completion, row, self.name)


def template_fields(template: str) -> list[str]:
    """Names of the `{fields}` in a template, in order of appearance."""
    return [name for _, name, _, _ in string.Formatter().parse(template) if name]


def fill_template(template: str, row: dict, application: str) -> str:
    """Fill `template` from `row`; a missing field is a UserError that names it and what is there."""
    missing = [name for name in template_fields(template) if name not in row]
    if missing:
        raise UserError(
            f"application '{application}': the row has no field '{missing[0]}' "
            f"(expected {', '.join(template_fields(template))}; found {', '.join(row) or 'none'})"
        )
    return template.format_map({name: row[name] for name in template_fields(template)})


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
    """Read `apps/<name>/app.toml`. Raises UserError listing the known names when it is unknown."""
    folder = applications_folder()
    path = folder / name / "app.toml"
    if not path.is_file():
        known = sorted(p.parent.name for p in folder.glob("*/app.toml"))
        raise UserError(f"unknown application '{name}' (found: {', '.join(known) or 'none'})")
    try:
        raw = tomllib.loads(path.read_text())
        return Application(
            name=raw["name"],
            title=raw.get("title", raw["name"]),
            template=raw["prompt"]["template"],
            completion=raw["prompt"]["completion"],
            hub=raw.get("data", {}).get("hub", ""),
            columns=raw.get("data", {}).get("columns", {}),
            metric=raw["metric"]["name"],
            reference=raw["metric"]["reference"],
            stop_strings=tuple(raw.get("stop", {}).get("strings", [])),
            max_tokens=int(raw.get("stop", {}).get("max_tokens", 256)),
        )
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise UserError(f"{path}: not a valid application description ({error})") from error
